"""Models that a folder does not hold as they are: without weights, with random ones, with a head added."""
