"""From texts to tokens and back: tokenizers, text rules and length limits of a model."""
