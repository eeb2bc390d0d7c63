"""Schemes: one file is one way to code weights; registry.py lists them, scheme.py says what each answers."""
