"""Recipes: read, checked and executed."""
