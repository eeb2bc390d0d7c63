"""TensorRT inside of ONNX Runtime: the providers, what they are told, their sessions and their caches."""
