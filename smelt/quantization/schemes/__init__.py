"""Quantization schemes: one file per kind of scheme; registry.py lists them."""
