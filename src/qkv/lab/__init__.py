"""Measurements: the paper's tables, ablations of recipes, speed of training and decoding."""
