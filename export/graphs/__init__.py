"""The graphs that a model is exported to, and what its attention and norms compute in them."""
