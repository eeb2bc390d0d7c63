"""Recipes as the plan reads them, without their model and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smelt.pipeline.recipe.recipe import ParsedRecipe, check_recipe
from smelt.pipeline.recipe.yaml_file import parse_yaml


def parse_recipe(text: str, path: Path, overrides: Sequence[str] = ()) -> ParsedRecipe:
    """Read a recipe from `text`, as if it were the file `path`; raise every error."""
    recipe, errors, _ = check_recipe(parse_yaml(text, str(path)), path, overrides)
    errors.raise_if_any()
    return recipe
