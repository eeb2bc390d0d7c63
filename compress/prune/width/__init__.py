"""The hidden states of a model become narrower."""
