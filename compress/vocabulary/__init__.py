"""Words that the data never use go."""
