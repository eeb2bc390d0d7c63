"""How many weights a model has, told by the headers of its files: those that have a place in it."""

from __future__ import annotations

from pathlib import Path

from smelt.core.files import read_json
from smelt.runtime.layers.matrix import Matrix
from smelt.runtime.models.making.empty_model import empty_model
from smelt.runtime.models.places.unread_tensors import is_unread
from smelt.runtime.models.structure import read_edits
from smelt.runtime.models.weight_files import values_in, weight_tensors
from smelt.runtime.text.sentence_files import MODULES


def count_parameters(folder: Path) -> int:
    """Return the number of weights of the model in `folder`, without reading them.

    A coded matrix counts as what its codes stand for, outputs times inputs: scales, zero points and what
    fills a group up are none of it, so that quantizing changes no count. What no model reads (masks and
    positions that old checkpoints hold) is not counted either.

    Raises:
        InputError: the model has codes, and config and edits make no model.
    """
    matrices = _matrices(folder)
    parts = tuple(f"{name}." for name in matrices)
    family, embeds = str(read_json(folder / "config.json").get("model_type")), (folder / MODULES).is_file()
    floats = sum(
        values_in(entry)
        for _, name, entry in weight_tensors(folder)
        if not name.startswith(parts) and not is_unread(family, name, embeds=embeds)
    )
    distinct = {id(matrix): matrix for matrix in matrices.values()}
    return floats + sum(len(matrix.codes) * matrix.width for matrix in distinct.values())


def _matrices(folder: Path) -> dict[str, Matrix]:
    """Return the coded matrices by all of their names; shared ones have several."""
    if not any(edit.get("op") == "quantize" for edit in read_edits(folder)):
        return {}
    modules = empty_model(folder)[0].named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, Matrix)}
