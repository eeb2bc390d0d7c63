"""Functions for finished artifacts: load, predict, score, measure latency, package."""
