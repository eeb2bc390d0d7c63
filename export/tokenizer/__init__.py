"""Whether the texts of an exported model are read without transformers, and the proof that it is exact."""
