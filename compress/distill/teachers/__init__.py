"""Load teachers, combine several into one, cache their outputs."""
