"""Pruning."""
