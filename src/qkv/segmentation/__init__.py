"""Cutting texts into sentences and joining them again."""
