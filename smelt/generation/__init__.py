"""From logits to tokens: greedy, sampled and beam search, the same for every runtime."""
