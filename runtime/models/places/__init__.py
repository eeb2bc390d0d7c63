"""Has every tensor of a checkpoint a place in the model, and every place a tensor?"""
