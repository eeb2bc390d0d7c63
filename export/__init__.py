"""From torch to ONNX to TensorRT."""
