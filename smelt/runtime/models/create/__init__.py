"""Models created from a folder: without weights, with random ones, with an added head."""
