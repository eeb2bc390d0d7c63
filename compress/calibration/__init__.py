"""Calibration: looking at what a model computes on a few rows, and going through it block by block."""
