"""Quantization-aware training: straight-through gradients, learned step sizes, stored master weights."""
