"""Counts a model's weights from the headers of its files."""

from __future__ import annotations

from pathlib import Path

from smelt.core.files import read_json_object
from smelt.runtime.layers.quantized_matrix import QuantizedMatrix
from smelt.runtime.models.create.empty_model import empty_model
from smelt.runtime.models.structure import read_edits
from smelt.runtime.models.weight_files import value_count, weight_tensors
from smelt.runtime.models.weights.unused_tensors import is_unused_tensor
from smelt.runtime.text.sentence_files import MODULES_FILE


def count_parameters(folder: Path) -> int:
    """Return the number of weights of the model in `folder`, without reading them.

    A quantized matrix counts as outputs times inputs: scales, zero points and padding
    of groups do not count, so that quantizing does not change the count. Unused tensors (masks and
    positions of old checkpoints) do not count either.

    Raises:
        InputError: the model is quantized, and config and edits do not define a model.
    """
    matrices = _quantized_matrices(folder)
    parts = tuple(f"{name}." for name in matrices)
    family, embeds = (
        str(read_json_object(folder / "config.json").get("model_type")),
        (folder / MODULES_FILE).is_file(),
    )
    floats = sum(
        value_count(entry)
        for _, name, entry in weight_tensors(folder)
        if not name.startswith(parts) and not is_unused_tensor(family, name, embeds=embeds)
    )
    distinct = {id(matrix): matrix for matrix in matrices.values()}
    return floats + sum(len(matrix.codes) * matrix.width for matrix in distinct.values())


def _quantized_matrices(folder: Path) -> dict[str, QuantizedMatrix]:
    """Return the quantized matrices by all of their names; shared ones have several."""
    if not any(edit.get("op") == "quantize" for edit in read_edits(folder)):
        return {}
    modules = empty_model(folder)[0].named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, QuantizedMatrix)}
