"""The hidden states of a sentence embedder's graph as an output of their own, from which others pool.

Shapes: B = batch, L = tokens, D = width.
"""

from __future__ import annotations

from typing import Any

from smelt.core.errors import RunError
from smelt.export.package.hub.decoders import HIDDEN
from smelt.runtime.embedder import VECTOR


def give_hidden_states(model: Any) -> None:
    """Add the output `last_hidden_state` float32 [B, L, D] to the onnx.ModelProto of an embedder, in place.

    Pooling reads what the last norm gives: no encoder of the house ends otherwise.

    Raises:
        RunError: the graph has no such norm.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    last = next((node for node in reversed(graph.node) if node.op_type == "LayerNormalization"), None)
    if last is None:
        raise RunError(
            "model.onnx: it has no LayerNormalization, so where its hidden states are is not known.",
            code="unsupported-graph",
            file="model.onnx",
        )
    width = next(o for o in graph.output if o.name == VECTOR).type.tensor_type.shape.dim[-1].dim_value
    rows = graph.input[0].type.tensor_type.shape.dim
    name = last.output[0]
    for node in graph.node:
        for names in (node.input, node.output):
            for place, one in enumerate(names):
                if one == name:
                    names[place] = HIDDEN
    shape = [rows[0].dim_param or rows[0].dim_value, rows[1].dim_param or rows[1].dim_value, width]
    graph.output.append(helper.make_tensor_value_info(HIDDEN, TensorProto.FLOAT, shape))
