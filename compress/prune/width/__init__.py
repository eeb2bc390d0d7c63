"""Pruning of the hidden width."""
