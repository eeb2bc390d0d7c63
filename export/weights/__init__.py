"""How weights lie in a graph: stored once, shared between files, in blocks beside their scales."""
