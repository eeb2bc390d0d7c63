"""Stages on ONNX graphs that were exported by other tools: simplify, quantize, narrow to float16."""
