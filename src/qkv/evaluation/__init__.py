"""How good translations are: scores, significance tests, and a diagnosis of faulty sentences."""

from __future__ import annotations
