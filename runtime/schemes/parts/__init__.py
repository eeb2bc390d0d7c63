"""What several schemes are made of: groups of inputs, packed codes, products of integers."""
