"""The whole generation as one ONNX graph: from the texts' tokens to those of the outputs."""
