"""Families of models: what their parts are called and how they hang together, one file each."""
