"""Positions and embeddings that are shifted, shortened or lost. See mutations.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from tests.support.graphs.graph_edits import (
    MATRIX_OPERATORS,
    NotApplicable,
    find_nodes,
    insert_after_value,
    mutation,
    replace_values,
    rewire,
)

_TABLES = ("embed_positions", "position_embeddings", "wpe")


@mutation
def position_off_by_one(model: Any) -> None:
    """The table of positions is read one place too far."""
    for node in find_nodes(model, "Gather"):
        if any(table_name in node.input[0] for table_name in _TABLES):
            _add(model, node, 1)
            return
    raise NotApplicable("positions")


@mutation
def relative_position_off_by_one(model: Any) -> None:
    """T5's table of biases by distance is read one place too early."""
    for node in find_nodes(model, "Gather"):
        if "bias_by_distance" in node.input[0]:
            _add(model, node, -1)
            return
    raise NotApplicable("distances")


def _add(model: Any, node: Any, number: int) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.int64), "one.mutation"))
    index = list(model.graph.node).index(node)
    new = helper.make_node("Add", [node.input[1], "one.mutation"], ["places.mutation"])
    node.input[1] = "places.mutation"
    rest = [*list(model.graph.node)[:index], new, *list(model.graph.node)[index:]]
    del model.graph.node[:]
    model.graph.node.extend(rest)


def _is_table(name: str, of_angles: str | tuple[str, ...]) -> bool:
    return any(text in name for text in (*_TABLES, "bias_by_distance")) or (
        "tables." in name and name.endswith(of_angles)
    )


@mutation
def shifted_table(model: Any) -> None:
    """The table of positions (of biases, of angles) begins one row later."""
    tensor = next((t for t in model.graph.initializer if _is_table(t.name, ".cos")), None)
    if tensor is None:
        raise NotApplicable("table")
    axis = 1 if "bias_by_distance" in tensor.name else 0
    replace_values(tensor, lambda v: np.roll(v, 1, axis=axis))


@mutation
def shorter_table(model: Any) -> None:
    """The table of positions (of angles) lacks its last row, which no text that is compared reaches."""
    tensors = [t for t in model.graph.initializer if _is_table(t.name, (".cos", ".sin"))]
    if not tensors:
        raise NotApplicable("table")
    for tensor in tensors:
        replace_values(
            tensor, _without_last_column if "bias_by_distance" in tensor.name else _without_last_row
        )


def _without_last_row(values: Any) -> Any:
    return values[:-1]


def _without_last_column(values: Any) -> Any:
    return values[:, :-1]


@mutation
def count_padding(model: Any) -> None:
    """A language model with a table of positions counts them from the first place, padding included."""
    if not any("wpe" in name for node in find_nodes(model, "Gather") for name in node.input):
        raise NotApplicable("a table of positions")
    insert_after_value(model, _position_ids(model), -1, "Add", np.array(1, np.int64))


@mutation
def forget_positions(model: Any) -> None:
    """All tokens of a language model are at place 0."""
    insert_after_value(model, _position_ids(model), -1, "Mul", np.array(0, np.int64))


def _position_ids(model: Any) -> str:
    """Return the name of the positions, if the graph uses them: fused rotary attention counts on its own."""
    rotates = [a.i for n in model.graph.node for a in n.attribute if a.name == "do_rotary"]
    if any(rotates) or not any(i.name == "position_ids" for i in model.graph.input):
        raise NotApplicable("position_ids")
    return "position_ids"


@mutation
def forget_embed_scale(model: Any) -> None:
    """Embeddings are not multiplied by their factor."""
    from smelt.export.parity.operator_checks import producing_nodes

    scalars = {t.name for t in model.graph.initializer if not t.dims and t.data_type == 1}
    for node in find_nodes(model, "Mul"):
        factors = [n for n in node.input if n in scalars]
        rest = [n for n in node.input if n not in scalars]
        if factors and rest:
            before, sources = producing_nodes(model, rest)
            kinds = [n.op_type for n in before]
            # 4-bit codes are taken apart by factors too: all of the lookup must lie before this one
            is_scaled = kinds[-1:] in (["Gather"], ["Mul"], ["Reshape"]) and "Gather" in kinds
            if "input_ids" in sources and is_scaled and not set(kinds) & set(MATRIX_OPERATORS):
                rewire(model, node.output[0], rest[0], node)
                return
    raise NotApplicable("embed_scale")


@mutation
def forget_token_types(model: Any) -> None:
    """All tokens have type 0."""
    if not any(i.name == "token_type_ids" for i in model.graph.input):
        raise NotApplicable("token_type_ids")
    insert_after_value(model, "token_type_ids", -1, "Mul", np.array(0, np.int64))
