"""The recipe as its author wrote it, and what is wrong with it, by line."""
