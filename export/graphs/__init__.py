"""The graphs that a model leaves as, and what its attention and norms compute in them."""
