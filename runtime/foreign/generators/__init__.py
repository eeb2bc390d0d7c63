"""Graphs that generate, as Optimum lays them out, made into those that smelt's runners call."""
