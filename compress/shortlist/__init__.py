"""The words that may come in a text, by the words of its source."""
