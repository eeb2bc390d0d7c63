"""Edits of a model's structure: each made again when it is read, and those that take parts out of it."""
