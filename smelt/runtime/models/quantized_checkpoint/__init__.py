"""Checkpoints quantized by other tools: read exactly, never rounded again."""
