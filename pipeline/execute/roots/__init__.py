"""The first artifact of a run, however it comes about."""
