"""The form `standalone`: graphs, tokenizer and one file of Python that answers with them."""
