"""Low-rank factorization."""
