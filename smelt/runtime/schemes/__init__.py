"""Quantization schemes: one file per scheme; registry.py lists them, scheme.py defines their interface."""
