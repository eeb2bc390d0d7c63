"""From an ONNX graph to a TensorRT engine: what is refused first, sizes, building, messages."""
