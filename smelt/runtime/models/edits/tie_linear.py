"""Ties a Linear to the rows of an embedding: they share one matrix, also after loading."""

from __future__ import annotations

from typing import Any

from torch import nn

from smelt.runtime.models.structure import Edit


def tie_linear(model: Any, name: str, table: str) -> Edit:
    """Tie the Linear `name` to the embedding `table`; return the edit.

    A file then contains their matrix once, and loading ties it again.

    Raises:
        TypeError: they are not a Linear and an Embedding.
        ValueError: their matrices have other shapes.
    """
    from smelt.runtime.layers.quantized import is_embedding_table

    linear, rows = model.get_submodule(name), model.get_submodule(table)
    if not isinstance(linear, nn.Linear) or not is_embedding_table(rows):
        raise TypeError("they are not a Linear and an Embedding")
    if linear.weight.shape != rows.weight.shape:
        raise ValueError("they have different sizes")
    linear.weight = rows.weight
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {**tied, f"{name}.weight": f"{table}.weight"}
    return {"op": "tie", "module": name, "with": table}
