"""What trains behind codes: gradients through rounding, learned step sizes, float weights that are kept."""
