"""Sensitivity of layers to quantization, and the choice of bit widths by it."""
