"""What schemes declare of themselves, as `quantize` takes it and shows it."""
