"""Losses shared by trainings: of tokens, of classes, of sentence embeddings."""
