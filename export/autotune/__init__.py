"""What an export chooses by measuring on this machine: operators of products, threads."""
