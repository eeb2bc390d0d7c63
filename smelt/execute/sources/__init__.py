"""Create the first artifact of a run."""
