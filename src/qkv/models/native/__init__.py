"""The Transformer's step in C, compiled on first use: no Python and no dispatcher between one product and the next."""
