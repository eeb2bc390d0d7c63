"""Quantization: a method decides codes and scales, the layer knows the rest."""
