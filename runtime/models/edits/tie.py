"""A Linear multiplies with the rows of an embedding: their matrix is one, also where it is read again."""

from __future__ import annotations

from typing import Any

from torch import nn

from smelt.runtime.models.structure import Edit


def tie(model: Any, name: str, table: str) -> Edit:
    """Let the Linear `name` multiply with the rows of the embedding `table`; return the edit that says so.

    A file then holds their matrix once, and whoever reads it ties it again.

    Raises:
        TypeError: they are no Linear and no Embedding.
        ValueError: their matrices have other shapes.
    """
    from smelt.runtime.layers.quantized import is_table

    linear, rows = model.get_submodule(name), model.get_submodule(table)
    if not isinstance(linear, nn.Linear) or not is_table(rows):
        raise TypeError("they are no Linear and no Embedding")
    if linear.weight.shape != rows.weight.shape:
        raise ValueError("they are of different sizes")
    linear.weight = rows.weight
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {**tied, f"{name}.weight": f"{table}.weight"}
    return {"op": "tie", "module": name, "with": table}
