"""The training pass of a Transformer over sentences laid end to end: no padding, few kernels, gradients by hand.

Each operation has a Triton kernel and a plain twin in the same file; they compute the same, dropout included.
"""
