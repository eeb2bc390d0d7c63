"""Recipes that ship with smelt; `smelt run NAME` finds them here."""
