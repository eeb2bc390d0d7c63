"""Stages on ONNX graphs that somebody else exported: simplify, quantize, narrow to float16."""
