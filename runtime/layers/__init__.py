"""The layers that stages put in, and what they become in a graph."""
