"""Recipes that start from ONNX graphs which somebody else exported."""
