"""The stage `prune`: structured pruning of heads, neurons, hidden width and channels."""
