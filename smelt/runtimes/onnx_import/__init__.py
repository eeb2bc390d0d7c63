"""Third-party ONNX graphs: validated with resource limits, copied, run from arrays to arrays."""
