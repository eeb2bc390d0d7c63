"""How codes are chosen: a file a method."""
