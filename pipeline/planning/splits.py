"""The rows that a recipe names: each split read from its file, or taken out of the training rows."""

from __future__ import annotations

from dataclasses import replace

from smelt.core.data import Split
from smelt.core.rows.examples import read_split
from smelt.core.shares import divide
from smelt.core.unlabelled import UNLABELLED, read_unlabelled
from smelt.recipe.recipe import Recipe


def read_source(recipe: Recipe, name: str) -> dict[str, Split]:
    """Read the rows of the split `name` of `recipe`; of `train` also the splits that are taken out of it.

    Raises:
        InputError: the rows cannot be read, or are too few to be divided.
    """
    data = recipe.data
    if name == UNLABELLED:
        return {name: read_unlabelled(data.files()[name], recipe.task, data.columns, recipe.base)}
    split = read_split(data.files()[name], recipe.task, data.columns, recipe.base, name, data.axes)
    shares = data.split.given() if name == "train" else {}
    parts = divide(split, shares, recipe.seed) if shares else {name: split}
    given = data.windows.model_dump(exclude_none=True)
    return {
        part: replace(rows, windows=rows.windows.model_copy(update=given)) if rows.windows else rows
        for part, rows in parts.items()
    }
