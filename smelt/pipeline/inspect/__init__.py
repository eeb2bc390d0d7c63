"""Inspect models, data and the machine without loading the model, and propose recipes."""
