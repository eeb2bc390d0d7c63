"""What a recipe will do on this machine, known before any work."""
