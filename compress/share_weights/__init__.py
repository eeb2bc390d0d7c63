"""Weight sharing between layers."""
