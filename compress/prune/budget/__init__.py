"""Pruning under a budget for the whole model: costs of units, and the allocation."""
