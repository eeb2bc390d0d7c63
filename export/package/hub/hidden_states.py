"""Add the hidden states of a sentence embedder's graph as an output, which other libraries pool.

Shapes: B = batch, L = tokens, D = width.
"""

from __future__ import annotations

from typing import Any

from smelt.core.errors import RunError
from smelt.export.package.hub.optimum_decoders import LAST_HIDDEN_STATE
from smelt.runtime.embedder import EMBEDDING_OUTPUT


def add_hidden_states_output(model: Any) -> None:
    """Add the output `last_hidden_state` float32 [B, L, D] to the onnx.ModelProto of an embedder, in place.

    It is the output of the last norm, which is the input of pooling in all supported encoders.

    Raises:
        RunError: the graph has no such norm.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    last = next((node for node in reversed(graph.node) if node.op_type == "LayerNormalization"), None)
    if last is None:
        raise RunError(
            "model.onnx: it has no LayerNormalization, so its hidden states cannot be found.",
            code="unsupported-graph",
            file="model.onnx",
        )
    width = (
        next(o for o in graph.output if o.name == EMBEDDING_OUTPUT).type.tensor_type.shape.dim[-1].dim_value
    )
    rows = graph.input[0].type.tensor_type.shape.dim
    name = last.output[0]
    for node in graph.node:
        for names in (node.input, node.output):
            for place, one in enumerate(names):
                if one == name:
                    names[place] = LAST_HIDDEN_STATE
    shape = [rows[0].dim_param or rows[0].dim_value, rows[1].dim_param or rows[1].dim_value, width]
    graph.output.append(helper.make_tensor_value_info(LAST_HIDDEN_STATE, TensorProto.FLOAT, shape))
