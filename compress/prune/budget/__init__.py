"""One budget over a model: what its units cost, and which of them are worth it."""
