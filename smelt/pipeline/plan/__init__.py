"""Check a recipe before any work."""
