"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# No deadline: a test never asserts a time. Derandomised: a failure on one machine is a failure on all.
settings.register_profile("qkv", deadline=None, derandomize=True)
settings.load_profile("qkv")
