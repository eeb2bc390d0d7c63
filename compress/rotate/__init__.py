"""Rotations of hidden states and of values, folded into the weights."""
