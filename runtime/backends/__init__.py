"""What runs a model: torch, ONNX Runtime, TensorRT."""
