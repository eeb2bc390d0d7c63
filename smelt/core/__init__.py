"""Basic types of every other part of smelt: artifact, store, stage, data, errors.

Nothing here imports torch or transformers, so that `smelt --help` and `smelt plan` stay fast.
"""
