"""From texts to tokens and back: tokenizers, a model's rules and limits."""
