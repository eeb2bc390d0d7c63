"""Importances of `prune`, one file each, and their registry."""
