"""Adds sentence-transformers pooling to a graph of hidden states, so that it returns vectors of texts.

Optimum's feature extraction returns `last_hidden_state` only. The added operators have the same form in all
opsets. Source: sentence_transformers/models/Pooling.py and Normalize.py.

Shapes: B = batch, L = tokens, D = width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from smelt.runtime.embedder import EMBEDDING_OUTPUT
from smelt.runtime.text.sentence_files import SentenceRules
from smelt.runtime.third_party.generators.graph_edits import copy_message, nodes_for_outputs

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
        there = self.node("Greater", column, self.constant(np.float32(0)))
        kept = self.node("Where", there, hidden, self.constant(np.float32(-np.inf)))
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
    made = [
        helper.make_node("Shape", ["input_ids"], [shape], shape),
        helper.make_node("ConstantOfShape", [shape], [TOKEN_TYPE_IDS], TOKEN_TYPE_IDS, value=zero),
    ]
    old = list(graph.node)
    del graph.node[:]
    graph.node.extend([*made, *old])
