"""Packages: an artifact in the form that another tool reads, as a folder of real files."""
