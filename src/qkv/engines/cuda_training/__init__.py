"""Training pass of a Transformer over sentences packed without padding: few kernels, hand-written gradients.

Each operation has a Triton kernel and a plain twin in the same file with equal results, dropout included.
"""
