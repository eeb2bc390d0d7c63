"""Importance scores of heads and neurons, one module per method."""
