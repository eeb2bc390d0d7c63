"""Loading weights: every tensor of a checkpoint must match the model, and the reverse."""
