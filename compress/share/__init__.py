"""Weights that several layers share."""
