"""Quantized layers, and what the quantization schemes share."""
