"""Training shared by techniques: settings, batches, the loop, checkpoint selection."""
