"""Each quantized operator of a graph against its layer, on identical inputs.

The inputs are rows of zeros and ones, each with its complement, and the same negated: int8 holds them
exactly in every scheme, whether ranges are found for a tensor, a row or a block; where a layer has a range of
its own, its end stands in the place of one. So the operator must give the product with what the layer's codes
stand for, up to the rounding of a sum. Every code takes part in half of the rows.

An operator is a node that multiplies codes, or a MatMul between explicit QuantizeLinear and DequantizeLinear;
the nodes that quantize its activations belong to it.

Shapes: M = rows fed, K = inputs, N = outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.core.errors import ParityError
from smelt.runtime.layers.quantized import QuantizedEmbedding, QuantizedLinear
from smelt.runtime.schemes.registry import operators

QUANTIZED = frozenset(operators())
EXPLICIT = frozenset({"QuantizeLinear", "DequantizeLinear"})
_WITHOUT_BIAS = frozenset({"MatMul", "MatMulBnb4"})
_ROWS = 8
# of an output's largest value. Kernels of some processors keep scales in 16 bits; the scales of the file
# itself are compared bit for bit (constants.py)
_ALLOWED = 5e-3
_ROUNDING = 1e-6  # of the sum of the magnitudes of what is added up, in float32


@dataclass(frozen=True)
class _Operator:
    """A quantized node, the nodes that make its constants, and the layer that it was made from.

    path: the nodes that the activations go through on their way to it, in order. inputs: how many it reads,
    K, or more where a scheme fills the last group up in front of its operator.
    """

    node: Any
    before: list[Any]
    name: str
    layer: QuantizedLinear
    path: list[Any]
    inputs: int

    @property
    def fed(self) -> tuple[int, float]:
        """How many inputs the node reads, and the number that stands for one."""
        matrix = self.layer.matrix
        return self.inputs, matrix.scheme.held_exactly(matrix)

    @property
    def bias(self) -> Tensor | None:
        """What the node adds; behind others it is added by another one."""
        return None if self.node.op_type in _WITHOUT_BIAS else self.layer.bias


def check_operators(graph: str, model: Any, module: nn.Module, path: Path, threads: int | None) -> int:
    """Run every quantized operator of a graph alone; return how many there are.

    Args:
        graph: name of the graph, for the message.
        model: its onnx.ModelProto; weights that lie outside need not be read.
        module: what was exported.
        path: where the graph lies; a file is made beside it and removed.
        threads: for ONNX Runtime.

    Raises:
        ParityError: an operator gives something else than its layer, or belongs to none.
    """
    from smelt.runtime.backends.onnx_session import open_session

    found = [_operator(graph, model, module, node) for node in _quantized(model)]
    if not found:
        return 0
    names = _inputs(found)
    file = path.with_name(f".{path.stem}-operators.onnx")
    try:
        _write_alone(model, found, file)
        session: Any = open_session(file, threads)
        for sign in (1, -1):
            inputs = {fed: sign * _zeros_and_ones(*fed) for fed in names}
            results = session.run(None, {name: inputs[fed] for fed, name in names.items()})
            for operator, got in zip(found, results, strict=True):
                _compare(graph, operator, inputs[operator.fed], got)
    except ParityError:
        raise
    except Exception as error:  # ONNX Runtime's errors share no other base
        raise ParityError(
            f"{graph}: its quantized operators cannot be run on their own: {error}",
            code="graph-failed",
            file=f"{graph}.onnx",
        ) from error
    finally:
        file.unlink(missing_ok=True)
    return len(found)


def _quantized(model: Any) -> Iterator[Any]:
    weights = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    for node in model.graph.node:
        if node.op_type in QUANTIZED or (node.op_type == "MatMul" and node.input[1] in weights):
            yield node


def _inputs(found: Iterable[_Operator]) -> dict[tuple[int, float], str]:
    """Return what the operators are fed (`_Operator.fed`) and the names of inputs for it."""
    return {fed: f"x{at}" for at, fed in enumerate(sorted({operator.fed for operator in found}))}


def _path(model: Any, node: Any) -> list[Any]:
    """Return the nodes that turn float32 activations into what `node` multiplies, in order."""
    makers = {other.output[0]: other for other in model.graph.node if other.op_type in EXPLICIT}
    found: list[Any] = []
    name = node.input[0]
    while name in makers:
        found.insert(0, makers[name])
        name = makers[name].input[0]
    return found


def _operator(graph: str, model: Any, module: nn.Module, node: Any) -> _Operator:
    """Find the layer that a node was made from by the name of its codes, whatever the scheme calls them."""
    before, others = makers_of(model, node.input[1:])
    _, names = makers_of(model, node.input[1:2])
    layers = (n.rpartition(".matrix.")[0] for n in names if ".matrix." in n)
    layer = next(layers, None)
    found = _product_of(module, layer) if layer else None
    parts = [(layer, part) for name in others for layer, at, part in [name.rpartition(".matrix.")] if at]
    if found is not None and len({layer for layer, _ in parts}) > 1:
        layer, found = _with_tensors(module, parts) or (layer, found)
    if layer is None or found is None:
        known = f"'{node.input[1]}', which belongs to no quantized layer"
        raise ParityError(
            f"{graph}: node '{node.name}' ({node.op_type}) multiplies with {known} of its parent.",
            code="unmatched-operator",
            file=f"{graph}.onnx",
        )
    return _Operator(node, before, layer, found, _path(model, node), _width(model, node, before, found))


def _width(model: Any, node: Any, before: list[Any], layer: QuantizedLinear) -> int:
    """Return how many inputs a node reads, as it says, or as its columns of codes [K, N] do."""
    said = next((attribute.i for attribute in node.attribute if attribute.name == "K"), None)
    makers = [other.input[0] for other in before if other.output[0] == node.input[1]]
    if said is None and node.op_type == "MatMul" and makers:
        said = next((t.dims[0] for t in model.graph.initializer if t.name == makers[0]), None)
    return layer.in_features if said is None else said


def _with_tensors(module: nn.Module, parts: list[tuple[str, str]]) -> tuple[str, QuantizedLinear] | None:
    """Return the layer whose tensors equal those of other layers: equal ones are one constant of a graph.

    Two matrices may have the same codes and other scales, as W and -W have.

    Args:
        module: with all of these layers.
        parts: by the name of a layer that of one of its matrix's tensors.
    """
    wanted = {}
    for name, part in parts:
        owner = _product_of(module, name)
        if owner is None or not owner.matrix.has(part):
            return None
        wanted[part] = owner.matrix.tensor(part)
    for name, layer in module.named_modules():
        if isinstance(layer, QuantizedLinear) and all(
            layer.matrix.has(part) and torch.equal(layer.matrix.tensor(part), tensor)
            for part, tensor in wanted.items()
        ):
            return name, layer
    return None


def _product_of(module: nn.Module, name: str) -> QuantizedLinear | None:
    """Return the layer `name`; of an embedding the layer that multiplies with its matrix."""
    try:
        found = module.get_submodule(name)
    except AttributeError:
        return None
    if isinstance(found, QuantizedEmbedding):
        layers = (m for m in module.modules() if isinstance(m, QuantizedLinear) and m.matrix is found.matrix)
        return next(layers, None)
    return found if isinstance(found, QuantizedLinear) else None


def makers_of(model: Any, names: Iterable[str]) -> tuple[list[Any], list[str]]:
    """Return the nodes that make the values `names`, in the graph's order, and the names below them."""
    makers = {name: at for at, other in enumerate(model.graph.node) for name in other.output}
    nodes: set[int] = set()
    sources: list[str] = []
    todo = list(names)
    while todo:
        name = todo.pop(0)
        at = makers.get(name)
        if at is None:
            sources.append(name)
        elif at not in nodes:
            nodes.add(at)
            todo += model.graph.node[at].input
    return [model.graph.node[at] for at in sorted(nodes)], sources


def _zeros_and_ones(size: int, one: float) -> NDArray[np.float32]:
    """Return float32 [_ROWS, size]: random rows and their complements; `one` in the place of 1."""
    rows = np.random.default_rng(size).integers(0, 2, (_ROWS // 2, size))
    return np.concatenate([rows, 1 - rows]).astype(np.float32) * np.float32(one)


def _write_alone(model: Any, found: list[_Operator], file: Path) -> None:
    """Write a graph of the operators alone, each with an output of its own, inputs shared."""
    from onnx import TensorProto, helper

    nodes: list[Any] = []
    outputs = []
    made: set[str] = set()
    names = _inputs(found)
    for number, operator in enumerate(found):
        nodes += [n for n in operator.before if n.output[0] not in made]
        made.update(n.output[0] for n in operator.before)
        nodes += _renamed([*operator.path, operator.node], names[operator.fed], f"y{number}")
        outputs.append(helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, None))
    inputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, [_ROWS, n]) for (n, _), x in names.items()]
    used = {name for node in nodes for name in node.input}
    alone = type(model)()
    alone.ir_version = model.ir_version
    alone.opset_import.extend(model.opset_import)
    alone.graph.CopyFrom(helper.make_graph(nodes, "operators", inputs, outputs))
    for tensor in model.graph.initializer:
        if tensor.name in used:
            alone.graph.initializer.add().CopyFrom(tensor)
    _widen(alone, file.parent)
    import onnx

    onnx.save(alone, file)


def _widen(alone: Any, folder: Path) -> None:
    """Let operators of a file in half precision compute in float32, which says what their constants are."""
    from onnx import TensorProto
    from onnx.external_data_helper import load_external_data_for_tensor

    from smelt.export.parity.twin import widen_halves

    for tensor in alone.graph.initializer:
        half = tensor.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
        if half and tensor.data_location == TensorProto.EXTERNAL:
            load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    widen_halves(alone)


def _renamed(path: list[Any], first: str, last: str) -> list[Any]:
    """Return copies of nodes that follow each other; the first one reads `first`, the last makes `last`."""
    nodes = []
    for at, node in enumerate(path):
        copy = type(node)()
        copy.CopyFrom(node)
        copy.name = f"{node.name}.{last}"  # several operators may share one that quantizes
        copy.input[0] = first
        first = copy.output[0] = last if at == len(path) - 1 else f"{last}.{at}"
        nodes.append(copy)
    return nodes


def _compare(graph: str, operator: _Operator, x: NDArray[np.float32], got: NDArray[np.float32]) -> None:
    layer = operator.layer
    with torch.inference_mode():  # the inputs go through quantization unchanged
        given = torch.from_numpy(x)[:, : layer.in_features]  # what fills a group up stands for nothing
        weight = layer.matrix.dequantize()
        expected = F.linear(given, weight, operator.bias).numpy()
        # a sum whose terms make up for each other is as exact as the terms are, whatever is left
        terms = _ROUNDING * F.linear(given.abs(), weight.abs()).numpy()
    node = f"{graph}: node '{operator.node.name}' ({operator.node.op_type})"
    if expected.shape != got.shape:
        raise ParityError(
            f"{node} gives the shape {got.shape}, its layer {operator.name} {expected.shape}.",
            code="shape-mismatch",
            file=f"{graph}.onnx",
        )
    reach = np.abs(expected).max(axis=0) + 1e-6 * float(np.abs(expected).max())
    wrong = np.clip(np.abs(expected - got) - terms, 0.0, None).max(axis=0)
    off = wrong / np.where(reach > 0, reach, 1.0)
    if not (largest := float(off.max())) <= _ALLOWED:
        raise ParityError(
            f"{node} computes something else than its layer {operator.name} on the same inputs: the output"
            f" {int(off.argmax())} is off by {largest:.3g} of its largest value, allowed {_ALLOWED:g}.",
            code="operator-mismatch",
            file=f"{graph}.onnx",
        )
