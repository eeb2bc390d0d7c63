"""Calibration: run a model on samples, collect statistics, process it block by block."""
