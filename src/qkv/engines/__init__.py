"""The same mathematics, faster: training on a GPU, decoding on a GPU, and decoding on a CPU in C."""
