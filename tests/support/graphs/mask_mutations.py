"""Masks that are lost, or hide and show the wrong places. See mutations.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from tests.support.graphs.graph_edits import (
    ATTENTION_OPERATORS,
    NotApplicable,
    find_nodes,
    has_attention_operator,
    insert_after_value,
    mutation,
    rewire,
    split_attention,
)


@mutation
def drop_padding_mask(model: Any) -> None:
    """The first attention that has a mask, or a bias of padding, forgets it."""
    if not has_attention_operator(model):
        scores, _ = split_attention(model)
        (masked,) = [node for node in model.graph.node if scores.output[0] in node.input]
        masked.op_type = "Identity"
        del masked.input[1:]
        return
    for node in find_nodes(model, *ATTENTION_OPERATORS):
        mask_input = 4 if node.op_type == "MultiHeadAttention" else 10
        if len(node.input) > mask_input and node.input[mask_input]:
            node.input[mask_input] = ""
            return
    raise NotApplicable("mask")


@mutation
def mask_of_ones(model: Any) -> None:
    """All attentions take padding for text: what is made of the mask no longer depends on it."""
    name = next(i.name for i in model.graph.input if i.name.endswith("attention_mask"))
    insert_after_value(model, name, -1, "Clip", np.array(1, np.int64))


@mutation
def allow_the_future(model: Any) -> None:
    """Keys that lie ahead are no longer masked (graphs of standard operators)."""
    node = find_nodes(model, "Greater")[0]
    node.input[0] = node.input[1]


@mutation
def shift_the_mask(model: Any) -> None:
    """The mask is read one place too far."""
    name = next(i.name for i in model.graph.input if i.name.endswith("attention_mask"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 1, 0, 0]), "pads"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**31]), "end"))
    rewire(model, name, "mask.shifted")
    slice_nodes = [
        helper.make_node("Slice", [name, "one", "end", "one"], ["mask.cut"]),
        helper.make_node("Pad", ["mask.cut", "pads.four"], ["mask.shifted"]),
    ]
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 0, 1]), "pads.four"))
    rest = [*slice_nodes, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(rest)
