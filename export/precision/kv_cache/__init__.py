"""Keys and values of a decoder-only model's cache as int8."""
