"""Whole layers go."""
