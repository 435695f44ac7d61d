"""Texts cut into sentences and put together again."""
