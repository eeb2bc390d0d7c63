"""Checkpoints of a training, their scores, and the rounding loss of 16-bit weights."""
