"""smelt makes trained transformers small and fast, one measured stage at a time."""
