"""Images on their way into a model: how they are made to pixels, and the runner that they go through."""
