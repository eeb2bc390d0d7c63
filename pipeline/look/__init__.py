"""What is seen of models and data without loading them."""
