"""ONNX graphs that somebody else exported: looked at with limits, copied, run from arrays to arrays."""
