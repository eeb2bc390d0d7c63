"""What one does with a finished artifact: load, predict, score, time."""
