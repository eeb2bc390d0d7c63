"""What TensorRT would reject or silently do otherwise: one rule is one small function, in one table."""
