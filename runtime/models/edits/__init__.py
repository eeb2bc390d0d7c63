"""Edits that take parts of all kinds out of a model."""
