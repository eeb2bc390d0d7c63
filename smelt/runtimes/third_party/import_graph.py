"""Import a third-party graph as the `model.onnx` of an artifact, with pooling if it has only hidden states.

A graph without external weights is copied byte by byte. External weights, under any file names,
are collected in `model.onnx_data`, as in smelt's own graphs.

Optimum's feature extraction returns `last_hidden_state` only. sentence-transformers pooling is added, so that
the graph returns vectors of texts. The added operators have the same form in all opsets. Source:
sentence_transformers/models/Pooling.py and Normalize.py.

Shapes: B = batch, L = tokens, D = width.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.errors import InputError
from smelt.models.text_rules import SentenceRules
from smelt.runtimes.runner import EMBEDDING_OUTPUT, MODEL_GRAPH
from smelt.runtimes.third_party.convert_optimum import copy_message, nodes_for_outputs
from smelt.runtimes.third_party.graph_files import (
    BITS_BY_TYPE,
    ExternalLocation,
    is_external,
    iter_model_tensors,
    resolve_external_data,
)

GRAPH_FILE = f"{MODEL_GRAPH}.onnx"
_BLOCK = 1 << 20
_PAGE = 4096  # a runtime maps the file into memory


def import_graph(source: Path, out: Path, outside: bool) -> Path:
    """Copy the graph in the file `source` into the folder `out`; return the copy.

    outside: whether it has external weights.

    Raises:
        InputError: they no longer exist.
    """
    target = out / GRAPH_FILE
    if not outside:
        shutil.copyfile(source, target)
        return target
    import onnx

    return write_with_external_data(onnx.ModelProto.FromString(source.read_bytes()), source, target)


def write_with_external_data(model: Any, source: Path, target: Path) -> Path:
    """Write an onnx.ModelProto, whose weights may be external to the file `source`, as `target`; return that.

    External weights are collected in the file `NAME.onnx_data` next to it.

    Raises:
        InputError: weights no longer exist.
    """
    try:
        if any(is_external(tensor) for tensor in iter_model_tensors(model)):
            _copy_external_data(model, source, target.with_name(f"{target.name}_data"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{source}: its weights cannot be copied: {error}.", code="unreadable-file"
        ) from error
    target.write_bytes(model.SerializeToString())
    return target


def _copy_external_data(model: Any, source: Path, data: Path) -> None:
    """Copy external data of `model` into the file `data`, each part once, and update `model`."""
    from onnx import TensorProto

    moved: dict[ExternalLocation, int] = {}
    with data.open("wb") as target:
        for tensor in iter_model_tensors(model):
            if not is_external(tensor):
                continue
            bits = BITS_BY_TYPE[TensorProto.DataType.Name(tensor.data_type)]
            place = resolve_external_data(tensor, source, -(-math.prod(tensor.dims) * bits // 8))
            if place not in moved:
                target.write(b"\0" * (-target.tell() % _PAGE))
                moved[place] = target.tell()
                _copy_bytes(place, target)
            del tensor.external_data[:]
            for key, value in (("location", data.name), ("offset", moved[place]), ("length", place.length)):
                tensor.external_data.add(key=key, value=str(value))


def _copy_bytes(place: ExternalLocation, target: Any) -> None:
    left = place.length
    with place.file.open("rb") as stream:
        stream.seek(place.offset)
        while left:
            block = stream.read(min(left, _BLOCK))
            if not block:
                raise ValueError(f"{place.file} is truncated")
            target.write(block)
            left -= len(block)


LAST_HIDDEN_STATE, ATTENTION_MASK, TOKEN_TYPE_IDS = "last_hidden_state", "attention_mask", "token_type_ids"
_NODE_PREFIX = "pooling."
_AXES_BY_INPUT = 18  # of ReduceMax
_EPSILONS = {"count": 1e-9, "length": 1e-12}


def add_pooling(path: Path, rules: SentenceRules) -> None:
    """Make the graph in `path` return `sentence_embedding` float32 [B, D], and take ids and mask only.

    A graph that already returns vectors keeps its own pooling. `token_type_ids` become zeros inside of it,
    their value for single texts.
    """
    import onnx

    model = onnx.ModelProto.FromString(path.read_bytes())
    graph = model.graph
    if all(output.name != EMBEDDING_OUTPUT for output in graph.output):
        _PoolingNodes(model).pool(rules)
    if any(value.name == TOKEN_TYPE_IDS for value in graph.input):
        _remove_token_types(graph)
    path.write_bytes(model.SerializeToString())


class _PoolingNodes:
    """Adds nodes after those of a graph."""

    def __init__(self, model: Any) -> None:
        self.graph = model.graph
        self.opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))

    def pool(self, rules: SentenceRules) -> None:
        from onnx import TensorProto, helper

        kept = [
            copy_message(node) for node in nodes_for_outputs(self.graph.node, [LAST_HIDDEN_STATE])
        ]  # other nodes may have our names
        del self.graph.node[:]
        self.graph.node.extend(kept)
        hidden = self.node("Cast", LAST_HIDDEN_STATE, to=TensorProto.FLOAT)
        mask = self.node("Cast", ATTENTION_MASK, to=TensorProto.FLOAT)
        vector = {"mean": self._mean_pooling, "cls": self._cls_pooling, "max": self._max_pooling}[
            rules.pooling
        ](hidden, mask)
        if rules.normalize:
            vector = self._normalized(vector)
        self.graph.node.append(
            helper.make_node("Identity", [vector], [EMBEDDING_OUTPUT], f"{_NODE_PREFIX}{EMBEDDING_OUTPUT}")
        )
        old = next(output for output in self.graph.output if output.name == LAST_HIDDEN_STATE)
        dims = old.type.tensor_type.shape.dim
        sizes = [d.dim_param or d.dim_value or None for d in dims] if len(dims) == 3 else [None] * 3
        del self.graph.output[:]
        self.graph.output.append(
            helper.make_tensor_value_info(EMBEDDING_OUTPUT, TensorProto.FLOAT, [sizes[0], sizes[2]])
        )

    def _cls_pooling(self, hidden: str, mask: str) -> str:
        return self.node("Gather", hidden, self.constant(0), axis=1)

    def _mean_pooling(self, hidden: str, mask: str) -> str:
        row, column = self.reshape(mask, [0, 1, -1]), self.reshape(mask, [0, -1, 1])
        zero = self.constant(0)
        total = self.node("Gather", self.node("MatMul", row, hidden), zero, axis=1)  # [B, D]
        count = self.node("Gather", self.node("MatMul", row, column), zero, axis=1)  # [B, 1]
        return self.node("Div", total, self.node("Max", count, self.constant(np.float32(_EPSILONS["count"]))))

    def _max_pooling(self, hidden: str, mask: str) -> str:
        column = self.reshape(mask, [0, -1, 1])
        unmasked = self.node("Greater", column, self.constant(np.float32(0)))
        kept = self.node("Where", unmasked, hidden, self.constant(np.float32(-np.inf)))
        if self.opset >= _AXES_BY_INPUT:
            return self.node("ReduceMax", kept, self.constant([1]), keepdims=0)
        return self.node("ReduceMax", kept, axes=[1], keepdims=0)

    def _normalized(self, vector: str) -> str:
        row, column = self.reshape(vector, [0, 1, -1]), self.reshape(vector, [0, -1, 1])
        length = self.reshape(self.node("Sqrt", self.node("MatMul", row, column)), [0, 1])
        return self.node(
            "Div", vector, self.node("Max", length, self.constant(np.float32(_EPSILONS["length"])))
        )

    def reshape(self, value: str, sizes: list[int]) -> str:
        return self.node("Reshape", value, self.constant(sizes))

    def constant(self, value: Any) -> str:
        from onnx import numpy_helper

        name = f"{_NODE_PREFIX}constant_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        name = f"{_NODE_PREFIX}{operator}_{len(self.graph.node)}"
        self.graph.node.append(helper.make_node(operator, list(inputs), [name], name, **attributes))
        return name


def _remove_token_types(graph: Any) -> None:
    """Replace the input `token_type_ids` by zeros of the shape of the ids, in place."""
    from onnx import helper

    value = next(value for value in graph.input if value.name == TOKEN_TYPE_IDS)
    graph.input.remove(value)
    zero = helper.make_tensor("zero", value.type.tensor_type.elem_type, [1], [0])
    shape = f"{TOKEN_TYPE_IDS}.shape"
    nodes = [
        helper.make_node("Shape", ["input_ids"], [shape], shape),
        helper.make_node("ConstantOfShape", [shape], [TOKEN_TYPE_IDS], TOKEN_TYPE_IDS, value=zero),
    ]
    old = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *old])
