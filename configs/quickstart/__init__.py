"""The example that ships with smelt: a small English-German model and the data it learned from."""
