"""What goes is learned with the weights: masks under a budget, and the cut of what they close."""
