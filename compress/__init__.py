"""Techniques that change a torch model: one file each."""
