"""Removal of whole layers, or of parts of layers."""
