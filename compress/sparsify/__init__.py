"""Weights without structure become zero."""
