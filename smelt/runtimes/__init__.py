"""What runs a model: torch, ONNX Runtime, OpenVINO, TensorRT."""
