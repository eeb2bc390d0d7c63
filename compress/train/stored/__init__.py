"""What is written of a training: what rounding costs, scores of what would be stored, checkpoints."""
