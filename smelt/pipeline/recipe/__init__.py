"""Read recipes and report their errors with line numbers."""
