"""More training: automatic recipe, distributed, matrix optimizers, memory limits."""
