"""The layers that stages insert, and their exported operators."""
