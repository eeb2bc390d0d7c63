"""The few words that every other part of smelt speaks: artifact, store, stage, data, errors.

Nothing here imports torch or transformers, so that `smelt --help` and `smelt plan` stay quick.
"""
