"""Training: loss, optimiser, checkpoints, log, and the loop that ties them together."""
