"""Unstructured and n:m sparsity of single weights."""
