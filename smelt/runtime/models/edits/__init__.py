"""Edits of a model's structure: applied when a model is loaded, or created when a part is removed."""
