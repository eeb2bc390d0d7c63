"""Generating graphs in Optimum's layout, converted to those of smelt's runners."""
