"""Removal of tokens that the data never use."""
