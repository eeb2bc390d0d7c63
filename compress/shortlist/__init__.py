"""Lexical shortlists: the target tokens that a source text allows."""
