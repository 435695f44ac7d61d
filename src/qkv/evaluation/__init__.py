"""How good a translation is, against references that are never changed."""

from __future__ import annotations
