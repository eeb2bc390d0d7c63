"""Read the splits of a recipe from their files, or take them from the training samples."""

from __future__ import annotations

from dataclasses import replace

from smelt.core.data import Split
from smelt.core.readers.examples import read_split
from smelt.core.split_division import divide_split
from smelt.core.unlabelled import UNLABELLED, read_unlabelled
from smelt.recipe.recipe import ParsedRecipe


def read_split_source(recipe: ParsedRecipe, name: str) -> dict[str, Split]:
    """Read the split `name` of `recipe`; for `train` also the splits that are taken from it.

    Raises:
        InputError: the samples cannot be read, or are too few to be divided.
    """
    data = recipe.data
    if name == UNLABELLED:
        return {name: read_unlabelled(data.split_files()[name], recipe.task, data.columns, recipe.base)}
    split = read_split(data.split_files()[name], recipe.task, data.columns, recipe.base, name, data.axes)
    shares = data.split.named_fractions() if name == "train" else {}
    parts = divide_split(split, shares, recipe.seed) if shares else {name: split}
    given = data.windows.model_dump(exclude_none=True)
    return {
        part: replace(rows, windows=rows.windows.model_copy(update=given)) if rows.windows else rows
        for part, rows in parts.items()
    }
