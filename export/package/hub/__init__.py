"""What the tools around the Hugging Face Hub want: their graphs, their tokenizer files, model cards."""
