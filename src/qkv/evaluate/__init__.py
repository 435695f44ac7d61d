"""How good a translation is, against references that are never changed."""
