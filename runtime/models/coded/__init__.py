"""Checkpoints whose weights somebody else has made codes of: read as they are, never rounded again."""
