"""Packages: an artifact in the form that somebody else's tool takes, as a folder of real files."""
