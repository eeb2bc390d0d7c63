"""Small valid ONNX graphs as old and new exporters write them, drawn by hypothesis, with rows to run them on.

    @given(random_graphs.graphs())
    def test(drawn): drawn.model, drawn.rows(seed)

A graph is a few blocks (random_graph_blocks.py) between its inputs and its outputs. What varies in all of
them: the opset (9 to 23), the IR version, where constants lie, names, the size of the batch, the values of
the inputs, and weights: some are float16, shared, zero, tiny, large, or have one large column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int, ...]
Draw = Callable[[Any], Any]
KINDS = ("mlp", "cnn", "attention", "recurrent", "control", "quantized")
_OPSETS = (9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
_ODD_NAMES = (
    "0", "file", "self", "arr_0", "a b", "a/b", "a:0", "é", "数", "%1", "<a>", "a,b", 'a"b', "..", "A" * 130,
)  # fmt: skip
# what ONNX Runtime's quantizers and smelt put behind a name
_NAME_ENDINGS = (
    *("_scale", "_quantized", "_zero_point", "_QuantizeLinear", "_DequantizeLinear", "_fp16", ".own0"),
    *("_QuantizeLinear_Output", "_DequantizeLinear_Output", "_quantized_scale", "_output_quantized",
        "_quant"),
)  # fmt: skip
_WEIGHT_STYLES = ("normal",) * 6 + ("zero", "tiny", "large", "outlier")
_INPUT_STYLES = ("normal",) * 4 + ("positive", "large", "tiny", "constant")
_BATCH_SIZES = {"N": None, None: None, 1: 1, 2: 2}
_ONNX_TYPES = {
    "float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32, "bool": 9,
}  # fmt: skip


@dataclass(frozen=True)
class GraphInput:
    """An input of a graph.

    shape: without the batch; None for rank 0. max_value: exclusive upper bound of integers.
    """

    name: str
    dtype: str
    shape: Shape | None
    values: str = "normal"
    max_value: int = 2

    def rows(self, count: int, random: np.random.Generator) -> NDArray[Any]:
        """Return `count` rows; an input of rank 0 has one value for all."""
        sizes = () if self.shape is None else (count, *self.shape)
        if self.dtype == "bool":
            return np.asarray(random.integers(0, 2, sizes) > 0)
        if self.dtype.startswith("int"):
            return np.asarray(
                random.integers(1 if self.max_value > 2 else 0, self.max_value, sizes), self.dtype
            )
        values = random.normal(size=sizes)
        if self.values == "mask":
            return np.asarray(values > 0, self.dtype)
        values = {"positive": np.abs(values), "large": 1e4 * values, "tiny": 1e-6 * values,
                 "constant": np.full(sizes, 0.5)}.get(self.values, values)  # fmt: skip
        return np.asarray(values, self.dtype)


@dataclass(frozen=True)
class RandomGraph:
    """A graph and what it takes. batch: the rows of a call, None: any number."""

    model: Any
    inputs: tuple[GraphInput, ...]
    batch: int | None
    blocks: tuple[str, ...]

    def rows(self, count: int, seed: int) -> dict[str, NDArray[Any]]:
        """Return rows for all inputs; attention masks begin with a one."""
        random = np.random.default_rng(seed)
        arrays = {graph_input.name: graph_input.rows(count, random) for graph_input in self.inputs}
        for graph_input in self.inputs:
            if graph_input.values == "mask":
                arrays[graph_input.name][:, 0] = 1
        return arrays

    def __repr__(self) -> str:
        version = self.model.opset_import[0].version
        return f"opset {version}, IR {self.model.ir_version}, batch {self.batch}: {', '.join(self.blocks)}"


@dataclass
class GraphWriter:
    """Collects a graph. scope: the one around a body of If, Loop or Scan."""

    draw: Draw
    opset: int
    ir: int
    batch: Any
    random: np.random.Generator
    scope: GraphWriter | None = None
    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    inputs: list[GraphInput] = field(default_factory=list)
    functions: dict[str, Any] = field(default_factory=dict)
    used_names: set[str] = field(default_factory=set)
    used_functions: set[str] = field(default_factory=set)  # names of nodes
    blocks: list[str] = field(default_factory=list)
    matrices: dict[Shape, list[str]] = field(default_factory=dict)

    def body(self) -> GraphWriter:
        """Return a writer for a graph inside of this one, which may read its values."""
        return GraphWriter(
            self.draw, self.opset, self.ir, self.batch, self.random, self, functions=self.functions,
            used_names=self.used_names, used_functions=self.used_functions, blocks=self.blocks,
        )  # fmt: skip

    def chance(self, of: int = 2) -> bool:
        """Return True once in `of` draws; False is what hypothesis shrinks to."""
        return bool(self.draw(st.integers(0, of - 1)) == of - 1)

    def one_of(self, choices: Sequence[Any]) -> Any:
        """Return one of them, the first when it shrinks."""
        return self.draw(st.sampled_from(choices))

    def name(self, hint: str) -> str:
        """Return a name that nothing has, odd at times."""
        unique_name = hint
        if self.chance(6):
            unique_name = self.one_of(_ODD_NAMES)
        elif self.used_names and self.chance(8):
            unique_name = self.one_of(sorted(self.used_names)) + self.one_of(_NAME_ENDINGS)
        while unique_name in self.used_names:
            unique_name += str(len(self.used_names))
        self.used_names.add(unique_name)
        return unique_name

    def node(self, operator: str, inputs: Sequence[str], count: int = 1, **attributes: Any) -> Any:
        """Add a node; return its output, or their list where `count` says how many."""
        outputs = [self.name(operator.lower()) for _ in range(count)]
        name = "" if self.chance(3) else self.one_of(("node", *_ODD_NAMES[:6], outputs[0]))
        while name and name in self.used_functions:
            name += str(len(self.used_functions))
        self.used_functions.add(name)
        self.nodes.append(helper.make_node(operator, list(inputs), outputs, name, **attributes))
        return outputs[0] if count == 1 else outputs

    def constant(self, value: Any, hint: str = "c") -> str:
        """Add a constant as an initializer or as a node; return its name."""
        value = np.asarray(value)
        in_body = self.scope is not None and self.ir < 4  # there each initializer is an input of the body
        name = self.name(hint)
        if not in_body and not self.chance(3):
            self.weights.append(numpy_helper.from_array(value, name))
            return name
        attribute = {"f": "value_float", "i": "value_int"}.get(value.dtype.kind, "")
        plain = value.dtype in (np.float32, np.int64) and value.ndim < 2 and value.size
        if self.opset >= 12 and plain and self.chance():
            options = {attribute + "s" * value.ndim: value.tolist()}
        else:
            options = {"value": numpy_helper.from_array(value, self.one_of(("", name)))}
        self.nodes.append(helper.make_node("Constant", [], [name], "", **options))
        return name

    def matrix(self, *sizes: int, fan_in: int | None = None) -> str:
        """Add float32 weights, or return some of this shape that another node reads."""
        candidates = self.matrices.setdefault(sizes, [])
        if candidates and self.chance(3):
            return str(self.one_of(candidates))
        values = self.random.normal(size=sizes) / np.sqrt(max(1, fan_in or sizes[0]))
        style = self.one_of(_WEIGHT_STYLES)
        if style == "outlier" and values.size and values.ndim:
            values[..., -1] *= 50
        values *= {"zero": 0.0, "tiny": 1e-7, "large": 300.0}.get(style, 1.0)
        candidates.append(self.constant(values.astype(np.float32), "w"))
        return candidates[-1]

    def bias(self, *sizes: int) -> str:
        """Add a float32 bias, or return one of this shape that another node reads."""
        return self.matrix(*sizes, fan_in=25)

    def input(self, dtype: str, shape: Shape | None, hint: str = "x", **more: Any) -> str:
        """Add an input of the graph; return its name."""
        if dtype == "float32" and "values" not in more:
            more["values"] = self.one_of(_INPUT_STYLES)
        self.inputs.append(GraphInput(self.name(hint), dtype, shape, **more))
        return self.inputs[-1].name

    def axes(self, operator: str, value: str, axes: Sequence[int], since: int, **more: Any) -> str:
        """Add an operator whose axes were an attribute before opset `since` and an input from it on."""
        if self.opset < since:
            return str(self.node(operator, [value], axes=list(axes), **more))
        return str(self.node(operator, [value, self.constant(np.array(axes, np.int64), "axes")], **more))

    def ints(self, *values: int) -> str:
        """Add a constant of int64 [n]."""
        return self.constant(np.array(values, np.int64), "sizes")


@st.composite
def random_graphs(draw: Draw, kinds: Sequence[str] = KINDS) -> RandomGraph:
    """Draw a graph of one of `kinds`."""
    from tests.support.graphs import random_graph_blocks

    opset = draw(st.sampled_from(_OPSETS[::-1]))
    ir = draw(st.sampled_from((8, 9, 10, 7, 4, 3)))
    batch = draw(st.sampled_from(list(_BATCH_SIZES)))
    w = GraphWriter(draw, opset, ir, batch, np.random.default_rng(draw(st.integers(0, 1000))))
    kind = w.one_of(list(kinds))
    w.blocks.append(kind)
    outputs = random_graph_blocks.write_blocks(w, kind)
    model = _model(w, outputs)
    if kind != "quantized" and w.chance(6):
        w.blocks.append("half")
        model = _in_half(model)
    return RandomGraph(model, tuple(w.inputs), _BATCH_SIZES[batch], tuple(w.blocks))


def _in_half(model: Any) -> Any:
    """Return the model with float16 weights and float32 ends, as ONNX Runtime's tool writes it."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    try:
        return convert_float_to_float16(model, keep_io_types=True, disable_shape_infer=True)
    except Exception:  # it does not know all operators
        return model


def _model(w: GraphWriter, ends: list[tuple[str, int, Sequence[Any] | None]]) -> Any:
    """Return the model of what was collected; ends: (name, type, shape) of its outputs."""
    info = helper.make_tensor_value_info
    inputs = [
        info(i.name, _ONNX_TYPES[i.dtype], [] if i.shape is None else [w.batch, *i.shape]) for i in w.inputs
    ]
    if w.ir < 4 or w.chance(6):
        inputs += [info(t.name, t.data_type, list(t.dims)) for t in w.weights]
    outputs = [info(name, kind, shape) for name, kind, shape in ends]
    graph = helper.make_graph(w.nodes, w.one_of(("graph", "g.0", "a b")), inputs, outputs, w.weights)
    domains = [("", w.opset), *([("local", 1)] if w.functions else [])]
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid(*domain) for domain in domains], ir_version=w.ir,
        functions=list(w.functions.values()),
    )  # fmt: skip
