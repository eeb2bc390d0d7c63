"""A graph of hidden states, made into one of vectors of texts: pooled as sentence-transformers pools.

Optimum's feature extraction leaves `last_hidden_state` to whoever calls it. Only operators whose form is the
same in all opsets are put behind it. Source: sentence_transformers/models/Pooling.py and Normalize.py.

Shapes: B = batch, L = tokens, D = width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from smelt.runtime.embedder import VECTOR
from smelt.runtime.foreign.generators.edit import copied, needed
from smelt.runtime.text.sentence_files import SentenceRules

HIDDEN, MASK, TYPES = "last_hidden_state", "attention_mask", "token_type_ids"
_NAME = "pooling."
_AXES_BY_INPUT = 18  # of ReduceMax
_LITTLE = {"count": 1e-9, "length": 1e-12}


def make_vectors(path: Path, rules: SentenceRules) -> None:
    """Let the graph in `path` give `sentence_embedding` float32 [B, D], and take ids and mask alone.

    A graph that gives vectors keeps its own pooling. `token_type_ids` become zeros inside of it: what they
    are for a text alone.
    """
    import onnx

    model = onnx.ModelProto.FromString(path.read_bytes())
    graph = model.graph
    if all(output.name != VECTOR for output in graph.output):
        _Behind(model).pool(rules)
    if any(value.name == TYPES for value in graph.input):
        _without_types(graph)
    path.write_bytes(model.SerializeToString())


class _Behind:
    """Puts nodes behind those of a graph."""

    def __init__(self, model: Any) -> None:
        self.graph = model.graph
        self.opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))

    def pool(self, rules: SentenceRules) -> None:
        from onnx import TensorProto, helper

        kept = [copied(node) for node in needed(self.graph.node, [HIDDEN])]  # others may have our names
        del self.graph.node[:]
        self.graph.node.extend(kept)
        hidden = self.node("Cast", HIDDEN, to=TensorProto.FLOAT)
        mask = self.node("Cast", MASK, to=TensorProto.FLOAT)
        vector = {"mean": self._mean, "cls": self._first, "max": self._max}[rules.pooling](hidden, mask)
        if rules.normalize:
            vector = self._normalized(vector)
        self.graph.node.append(helper.make_node("Identity", [vector], [VECTOR], f"{_NAME}{VECTOR}"))
        old = next(output for output in self.graph.output if output.name == HIDDEN)
        dims = old.type.tensor_type.shape.dim
        sizes = [d.dim_param or d.dim_value or None for d in dims] if len(dims) == 3 else [None] * 3
        del self.graph.output[:]
        self.graph.output.append(
            helper.make_tensor_value_info(VECTOR, TensorProto.FLOAT, [sizes[0], sizes[2]])
        )

    def _first(self, hidden: str, mask: str) -> str:
        return self.node("Gather", hidden, self.number(0), axis=1)

    def _mean(self, hidden: str, mask: str) -> str:
        row, column = self.reshaped(mask, [0, 1, -1]), self.reshaped(mask, [0, -1, 1])
        zero = self.number(0)
        total = self.node("Gather", self.node("MatMul", row, hidden), zero, axis=1)  # [B, D]
        count = self.node("Gather", self.node("MatMul", row, column), zero, axis=1)  # [B, 1]
        return self.node("Div", total, self.node("Max", count, self.number(np.float32(_LITTLE["count"]))))

    def _max(self, hidden: str, mask: str) -> str:
        column = self.reshaped(mask, [0, -1, 1])
        there = self.node("Greater", column, self.number(np.float32(0)))
        kept = self.node("Where", there, hidden, self.number(np.float32(-np.inf)))
        if self.opset >= _AXES_BY_INPUT:
            return self.node("ReduceMax", kept, self.number([1]), keepdims=0)
        return self.node("ReduceMax", kept, axes=[1], keepdims=0)

    def _normalized(self, vector: str) -> str:
        row, column = self.reshaped(vector, [0, 1, -1]), self.reshaped(vector, [0, -1, 1])
        length = self.reshaped(self.node("Sqrt", self.node("MatMul", row, column)), [0, 1])
        return self.node("Div", vector, self.node("Max", length, self.number(np.float32(_LITTLE["length"]))))

    def reshaped(self, value: str, sizes: list[int]) -> str:
        return self.node("Reshape", value, self.number(sizes))

    def number(self, value: Any) -> str:
        from onnx import numpy_helper

        name = f"{_NAME}constant_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        name = f"{_NAME}{operator}_{len(self.graph.node)}"
        self.graph.node.append(helper.make_node(operator, list(inputs), [name], name, **attributes))
        return name


def _without_types(graph: Any) -> None:
    """Let `token_type_ids` be zeros of the shape of the ids, in place."""
    from onnx import helper

    value = next(value for value in graph.input if value.name == TYPES)
    graph.input.remove(value)
    zero = helper.make_tensor("zero", value.type.tensor_type.elem_type, [1], [0])
    shape = f"{TYPES}.shape"
    made = [
        helper.make_node("Shape", ["input_ids"], [shape], shape),
        helper.make_node("ConstantOfShape", [shape], [TYPES], TYPES, value=zero),
    ]
    old = list(graph.node)
    del graph.node[:]
    graph.node.extend([*made, *old])
