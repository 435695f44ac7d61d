"""Decoding on a GPU: continuous batching in CUDA graphs, with Triton kernels for attention and search."""
