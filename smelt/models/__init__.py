"""Models in torch: checkpoints, structure edits, tokenizers, image processors."""
