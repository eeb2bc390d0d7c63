"""Read recipes and report their mistakes with line numbers."""
