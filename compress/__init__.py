"""Compression techniques for torch models, one module or package each."""
