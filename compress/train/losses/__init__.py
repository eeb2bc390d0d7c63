"""The losses that trainings share: of tokens, of classes, of sentence vectors."""
