"""Model families: names of their parts and how they are connected, one file each."""
