"""Data: from text files to batches of ids."""
