"""How good translations are: scores, significance tests, and a diagnosis of what went wrong."""

from __future__ import annotations
