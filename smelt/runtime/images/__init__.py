"""Images as model inputs: preprocessing, and the runner of image classifiers."""
