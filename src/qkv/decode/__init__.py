"""Decoding: search for the best translation, and the score of a given one."""
