"""TensorRT in ONNX Runtime: providers, their options, sessions and caches."""
