"""Learned masks: masks trained with the weights under a budget, and removal of the masked units."""
