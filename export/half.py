"""From a float32 graph to a float16 one.

Precision lives in the file: TensorRT 11 takes it as it is, and two types into one operator are a parse
error there. So everything becomes float16, the caches too; only `logits` and the vectors of texts leave
as float32. The graph is converted instead of the torch model because transformers' encoder layers branch
on the data in float16, which cannot be traced.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from smelt.core.errors import RunError
from smelt.runtime.batch import ENCODED


def to_half(model: Any, name: str) -> None:
    """Convert the onnx.ModelProto `model` in place; `name` is the graph's name for messages.

    Raises:
        RunError: a weight or constant lies outside what float16 can hold.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    for tensor in graph.initializer:
        _convert(tensor, name)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _convert(attribute.t, name)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    for value in [*graph.input, *graph.output]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in ENCODED:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    del graph.value_info[:]
    for node in list(graph.node):
        for out in set(ENCODED).intersection(node.output):
            node.output[list(node.output).index(out)] = f"{out}_half"
            graph.node.append(helper.make_node("Cast", [f"{out}_half"], [out], to=TensorProto.FLOAT))


def _convert(tensor: Any, name: str) -> None:
    from onnx import TensorProto, numpy_helper

    if tensor.data_type != TensorProto.FLOAT:
        return
    values = numpy_helper.to_array(tensor)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise RunError(
            f"{name}: '{tensor.name}' holds {float(np.abs(values).max()):.4g}, which float16 cannot"
            " (at most 65504). Export with dtype: fp32."
        )
    # in place: protobuf copies no tensor above 2 GB
    tensor.ClearField("float_data")
    tensor.data_type, tensor.raw_data = TensorProto.FLOAT16, half.astype("<f2").tobytes()
