"""Check each quantized operator of a graph against its layer, and run a graph with all outputs of a session.

An operator and its layer get identical inputs: rows of zeros and ones, each with its complement, and their
negatives. int8 represents them exactly in every scheme, whether ranges are per tensor, row or block; if a
layer has a calibrated range, its ends replace one and minus one. So the operator must return the product with
the dequantized weights, up to the rounding of a sum. Every quantized weight takes part in half of the rows.

An operator is a node that multiplies quantized weights, or a MatMul between explicit QuantizeLinear and
DequantizeLinear; the nodes that quantize its activations belong to it.

`run_graph_calls` runs one graph of an artifact as a runner would, call by call; `open_with_outputs` opens it
with its inner values as outputs.

Shapes: M = input rows, K = inputs, N = outputs, B = batch, L = source length or prompt, S = new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.core.errors import ParityError
from smelt.export.graph_files import link_external_data, write_graph
from smelt.export.parity.references import TorchReference, widen_to_float32
from smelt.generation.backend import PAST_PREFIX, FeedBatch
from smelt.generation.generating_runners import position_ids
from smelt.quantization.groupwise import MATMUL_NBITS
from smelt.quantization.layers import QuantizedEmbedding, QuantizedLinear
from smelt.quantization.scheme import QuantizedGraph
from smelt.quantization.schemes.nvfp4 import DYNAMIC_QUANTIZE
from smelt.quantization.schemes.registry import owner_of_operator
from smelt.runtimes.fixed_caches import cache_feeds, fixed_cache_length
from smelt.runtimes.fixed_shapes import FixedShape, fixed_feeds, read_fixed_shape

_ACTIVATION_OPS = frozenset({"QuantizeLinear", "DequantizeLinear", DYNAMIC_QUANTIZE})
_WITHOUT_BIAS = frozenset({"MatMul", "MatMulBnb4"})
_NBITS_BIAS = 5  # the input of MatMulNBits
_TEST_ROWS = 8
_WEIGHTS_AT_ONCE = 2**28
# of an output's largest value. Kernels of some processors keep scales in 16 bits; the scales of the file
# itself are compared bit for bit (`check_constants`)
_TOLERANCE = 5e-3
_ROUNDING_TOLERANCE = 1e-6  # of the sum of the magnitudes of the terms, in float32


@dataclass(frozen=True)
class _QuantizedNode:
    """A quantized node, the nodes that compute its constants, and its layer.

    activation_nodes: the nodes that quantize its activations, in order. inputs: the number of its inputs, K,
    or more if a scheme pads the last group before its operator.
    """

    node: Any
    constant_nodes: list[Any]
    name: str
    layer: QuantizedLinear
    activation_nodes: list[Any]
    inputs: int

    @property
    def test_input(self) -> tuple[int, float, float]:
        """The number of the node's inputs, and the values that represent minus one and one."""
        matrix = self.layer.matrix
        return self.inputs, *matrix.scheme.exact_activations(matrix)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the node; for some schemes a separate node adds it."""
        node = self.node
        separate = node.op_type == MATMUL_NBITS and len(node.input) <= _NBITS_BIAS
        return None if separate or node.op_type in _WITHOUT_BIAS else self.layer.bias


def check_operators(graph: str, model: Any, module: nn.Module, path: Path, threads: int | None) -> int:
    """Run every quantized operator of a graph alone; return their number.

    Args:
        graph: name of the graph, for the message.
        model: its onnx.ModelProto; external weights need not be loaded.
        module: the exported module.
        path: of the graph; a temporary file is created next to it.
        threads: for ONNX Runtime.

    Raises:
        ParityError: an operator's output differs from its layer's, or it has no layer.
    """
    from smelt.runtimes.onnx_session import open_onnx_session

    quantized_nodes = [_match_layer(graph, model, module, node) for node in _quantized_nodes(model)]
    if not quantized_nodes:
        return 0
    file = path.with_name(f".{path.stem}-operators.onnx")
    try:
        for part in _parts(quantized_nodes):
            names = _test_inputs(part)
            _write_operator_graph(model, part, file)
            session: Any = open_onnx_session(file, threads)
            for end in (2, 1):
                inputs = {test_input: _binary_rows(test_input[0], test_input[end]) for test_input in names}
                results = session.run(None, {name: inputs[test_input] for test_input, name in names.items()})
                for operator, actual in zip(part, results, strict=True):
                    _compare(graph, operator, inputs[operator.test_input], actual)
            del session  # it holds the weights
    except ParityError:
        raise
    except Exception as error:  # ONNX Runtime's errors share no other base class
        raise ParityError(
            f"{graph}: its quantized operators cannot be run separately: {error}",
            code="graph-failed",
            file=f"{graph}.onnx",
        ) from error
    finally:
        file.unlink(missing_ok=True)
    return len(quantized_nodes)


def _parts(operators: Iterable[_QuantizedNode]) -> Iterator[list[_QuantizedNode]]:
    """Yield the operators in parts of about `_WEIGHTS_AT_ONCE` weights, which one session holds."""
    part: list[_QuantizedNode] = []
    size = 0
    for operator in operators:
        count = operator.layer.in_features * operator.layer.out_features
        if part and size + count > _WEIGHTS_AT_ONCE:
            yield part
            part, size = [], 0
        part.append(operator)
        size += count
    yield part


def _quantized_nodes(model: Any) -> Iterator[Any]:
    graph = QuantizedGraph(model.graph)
    weights = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    for node in model.graph.node:
        explicit = node.op_type == "MatMul" and node.input[1] in weights
        if explicit or owner_of_operator(node, graph) is not None:
            yield node


def _test_inputs(operators: Iterable[_QuantizedNode]) -> dict[tuple[int, float, float], str]:
    """Return the inputs of the operators (`_QuantizedNode.test_input`) and their names."""
    return {
        test_input: f"x{input_index}"
        for input_index, test_input in enumerate(sorted({operator.test_input for operator in operators}))
    }


def _activation_path(model: Any, node: Any) -> list[Any]:
    """Return the nodes that convert float32 activations to the inputs of `node`, in order."""
    producers = {
        name: index
        for index, other in enumerate(model.graph.node)
        if other.op_type in _ACTIVATION_OPS
        for name in other.output
    }
    indices: set[int] = set()
    todo = [node.input[0]]
    while todo:
        index = producers.get(todo.pop())
        if index is not None and index not in indices:
            indices.add(index)
            todo += model.graph.node[index].input
    return [model.graph.node[index] for index in sorted(indices)]


def _match_layer(graph: str, model: Any, module: nn.Module, node: Any) -> _QuantizedNode:
    """Return a node with its layer, found by the name of its quantized weights in the scheme."""
    weight_nodes, weight_names = producing_nodes(model, node.input[1:])
    _, names = producing_nodes(model, node.input[1:2])
    layers = (n.rpartition(".matrix.")[0] for n in names if ".matrix." in n)
    layer = next(layers, None)
    linear = _linear_of_layer(module, layer) if layer else None
    parts = [
        (layer, part)
        for name in weight_names
        for layer, separator, part in [name.rpartition(".matrix.")]
        if separator
    ]
    if linear is not None and len({layer for layer, _ in parts}) > 1:
        layer, linear = _layer_with_equal_tensors(module, parts) or (layer, linear)
    # layers with equal weights share one constant, and may have different biases
    for name in weight_names:
        owner = _linear_of_layer(module, name.removesuffix(".bias")) if name.endswith(".bias") else None
        if owner is not None and linear is not None and _have_equal_tensors(owner, linear, parts):
            layer, linear = name.removesuffix(".bias"), owner
    if layer is None or linear is None:
        weight_text = f"'{node.input[1]}', which belongs to no quantized layer"
        raise ParityError(
            f"{graph}: node '{node.name}' ({node.op_type}) uses the weight {weight_text} of its parent.",
            code="unmatched-operator",
            file=f"{graph}.onnx",
        )
    return _QuantizedNode(
        node,
        weight_nodes,
        layer,
        linear,
        _activation_path(model, node),
        _input_width(model, node, weight_nodes, linear),
    )


def _input_width(model: Any, node: Any, before: list[Any], layer: QuantizedLinear) -> int:
    """Return the number of a node's inputs, from its attribute or from the columns of its weights [K, N]."""
    width = next((attribute.i for attribute in node.attribute if attribute.name == "K"), None)
    producer_inputs = [other.input[0] for other in before if other.output[0] == node.input[1]]
    if width is None and node.op_type == "MatMul" and producer_inputs:
        width = next((t.dims[0] for t in model.graph.initializer if t.name == producer_inputs[0]), None)
    return layer.in_features if width is None else width


def _layer_with_equal_tensors(
    module: nn.Module, parts: list[tuple[str, str]]
) -> tuple[str, QuantizedLinear] | None:
    """Return the layer whose tensors equal those of other layers: equal tensors share one constant.

    Two matrices may have the same quantized weights and different scales, as W and -W.

    Args:
        module: with all of these layers.
        parts: by the name of a layer that of one of its matrix's tensors.
    """
    part_tensors = {}
    for name, part in parts:
        owner = _linear_of_layer(module, name)
        if owner is None or not owner.matrix.has(part):
            return None
        part_tensors[part] = owner.matrix.tensor(part)
    for name, layer in module.named_modules():
        if isinstance(layer, QuantizedLinear) and all(
            layer.matrix.has(part) and torch.equal(layer.matrix.tensor(part), tensor)
            for part, tensor in part_tensors.items()
        ):
            return name, layer
    return None


def _have_equal_tensors(a: QuantizedLinear, b: QuantizedLinear, parts: list[tuple[str, str]]) -> bool:
    """Return whether the matrices of two layers have the same tensors; parts: as above."""
    return all(
        a.matrix.has(part)
        and b.matrix.has(part)
        and torch.equal(a.matrix.tensor(part), b.matrix.tensor(part))
        for _, part in parts
    )


def _linear_of_layer(module: nn.Module, name: str) -> QuantizedLinear | None:
    """Return the layer `name`; for an embedding the layer that multiplies with its matrix."""
    try:
        submodule = module.get_submodule(name)
    except AttributeError:
        return None
    if isinstance(submodule, QuantizedEmbedding):
        layers = (
            m for m in module.modules() if isinstance(m, QuantizedLinear) and m.matrix is submodule.matrix
        )
        return next(layers, None)
    return submodule if isinstance(submodule, QuantizedLinear) else None


def producing_nodes(model: Any, names: Iterable[str]) -> tuple[list[Any], list[str]]:
    """Return the nodes that compute the values `names`, in the graph's order, and their input names."""
    producer_indices = {
        name: node_index for node_index, other in enumerate(model.graph.node) for name in other.output
    }
    nodes: set[int] = set()
    sources: list[str] = []
    todo = list(names)
    while todo:
        name = todo.pop(0)
        node_index = producer_indices.get(name)
        if node_index is None:
            sources.append(name)
        elif node_index not in nodes:
            nodes.add(node_index)
            todo += model.graph.node[node_index].input
    return [model.graph.node[node_index] for node_index in sorted(nodes)], sources


def _binary_rows(size: int, value: float) -> NDArray[np.float32]:
    """Return float32 [_ROWS, size]: random rows and their complements, with `value` instead of 1."""
    binary = np.random.default_rng(size).integers(0, 2, (_TEST_ROWS // 2, size))
    return np.concatenate([binary, 1 - binary]).astype(np.float32) * np.float32(value)


def _write_operator_graph(model: Any, operators: list[_QuantizedNode], file: Path) -> None:
    """Write a graph of only the operators, each with its own output, with shared inputs."""
    from onnx import TensorProto, helper

    nodes: list[Any] = []
    outputs = []
    constants: set[str] = set()
    names = _test_inputs(operators)
    for operator_index, operator in enumerate(operators):
        nodes += [n for n in operator.constant_nodes if n.output[0] not in constants]
        constants.update(n.output[0] for n in operator.constant_nodes)
        nodes += _rename_chain(
            [*operator.activation_nodes, operator.node], names[operator.test_input], f"y{operator_index}"
        )
        outputs.append(helper.make_tensor_value_info(f"y{operator_index}", TensorProto.FLOAT, None))
    inputs = [
        helper.make_tensor_value_info(x, TensorProto.FLOAT, [_TEST_ROWS, n]) for (n, *_), x in names.items()
    ]
    used_names = {name for node in nodes for name in node.input}
    operator_model = type(model)()
    operator_model.ir_version = model.ir_version
    operator_model.opset_import.extend(model.opset_import)
    operator_model.graph.CopyFrom(helper.make_graph(nodes, "operators", inputs, outputs))
    for tensor in model.graph.initializer:
        if tensor.name in used_names:
            operator_model.graph.initializer.add().CopyFrom(tensor)
    _widen(operator_model, file.parent)
    import onnx

    onnx.save(operator_model, file)


def _widen(alone: Any, folder: Path) -> None:
    """Make operators of a half-precision file compute in float32, with the same constants."""
    from onnx import TensorProto
    from onnx.external_data_helper import load_external_data_for_tensor

    for tensor in alone.graph.initializer:
        half = tensor.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
        if half and tensor.data_location == TensorProto.EXTERNAL:
            load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    widen_to_float32(alone)


def _rename_chain(path: list[Any], first: str, last: str) -> list[Any]:
    """Return copies of nodes that read each other's outputs, from the value `first` to `last`."""
    nodes = []
    renamed = {path[0].input[0]: first}
    for index, node in enumerate(path):
        copy = type(node)()
        copy.CopyFrom(node)
        copy.name = f"{node.name}.{last}"  # several operators may share a quantizing node
        for position, name in enumerate(node.input):
            copy.input[position] = renamed.get(name, name)
        for position, name in enumerate(node.output):
            is_last = index == len(path) - 1
            copy.output[position] = renamed[name] = last if is_last else f"{last}.{index}.{position}"
        nodes.append(copy)
    return nodes


def _compare(graph: str, operator: _QuantizedNode, x: NDArray[np.float32], got: NDArray[np.float32]) -> None:
    layer = operator.layer
    with torch.inference_mode():  # the inputs are not changed by quantization
        inputs = torch.from_numpy(x)[:, : layer.in_features]  # padding of a group is ignored
        weight = layer.matrix.dequantize()
        expected = F.linear(inputs, weight, operator.bias).numpy()
        # a sum of canceling terms is only as exact as its terms
        terms = _ROUNDING_TOLERANCE * F.linear(inputs.abs(), weight.abs_()).numpy()
    node = f"{graph}: node '{operator.node.name}' ({operator.node.op_type})"
    if expected.shape != got.shape:
        raise ParityError(
            f"{node} returns the shape {got.shape}, but its layer {operator.name} returns {expected.shape}.",
            code="shape-mismatch",
            file=f"{graph}.onnx",
        )
    magnitudes = np.abs(expected).max(axis=0) + 1e-6 * float(np.abs(expected).max())
    wrong = np.clip(np.abs(expected - got) - terms, 0.0, None).max(axis=0)
    off = wrong / np.where(magnitudes > 0, magnitudes, 1.0)
    if not (largest := float(off.max())) <= _TOLERANCE:
        raise ParityError(
            f"{node} and its layer {operator.name} return different outputs for the same inputs: output"
            f" {int(off.argmax())} differs by {largest:.3g} of its largest value; the limit is"
            f" {_TOLERANCE:g}.",
            code="operator-mismatch",
            file=f"{graph}.onnx",
        )


TensorsByName = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class GraphCall:
    """One call of a graph: its inputs, and which part [B, S] of a layer's output [B, all] it computes.

    token_mask: bool [B, S], false at padding; None if there is none (images).
    """

    feeds: TensorsByName
    positions: slice
    token_mask: NDArray[np.bool_] | None


def open_with_outputs(
    model: Any,
    folder: Path,
    name: str,
    values: Iterable[str],
    threads: int | None = None,
    optimized: bool = True,
) -> Any:
    """Open a graph with additional outputs.

    Args:
        model: its onnx.ModelProto, which is changed; external weights need not be loaded.
        folder: with its external weights; a temporary folder is created in it.
        name: of the graph.
        values: names of the new outputs; empty ones, inputs, outputs and weights are skipped.
        threads: of ONNX Runtime.
        optimized: see `open_onnx_session`.
    """
    from onnx import ValueInfoProto

    from smelt.runtimes.onnx_session import open_onnx_session

    graph = model.graph
    existing_names = {"", *(value.name for value in (*graph.input, *graph.output, *graph.initializer))}
    graph.output.extend(
        ValueInfoProto(name=value) for value in dict.fromkeys(values) if value not in existing_names
    )
    with TemporaryDirectory(dir=folder) as temporary:
        link_external_data(model, folder, Path(temporary))
        write_graph(model, path := Path(temporary, f"{name}.onnx"))
        return open_onnx_session(path, threads, optimized=optimized)


def session_shape(session: Any) -> FixedShape:
    """Return the fixed sizes of a graph's inputs; of a graph with caches none."""
    inputs = {i.name: i.shape for i in session.get_inputs()}
    if any(name.startswith(PAST_PREFIX) for name in inputs):
        return FixedShape()
    return read_fixed_shape(
        {name: [n if isinstance(n, int) else None for n in shape] for name, shape in inputs.items()}
    )


def run_graph_calls(
    session: Any, folder: Path, name: str, reference: TorchReference
) -> Iterator[tuple[GraphCall, TensorsByName]]:
    """Yield each call of a graph, in float32, with all outputs of the session.

    Args:
        session: of the graph, which may have more outputs than the one in `folder`.
        folder: with all graphs of the model.
        name: of the graph.
        reference: the batch, and the input tokens of a decoder.
    """
    from smelt.runtimes.onnx_session import open_onnx_session

    batch = reference.batch
    if isinstance(batch, FeedBatch):
        for feeds in fixed_feeds(batch.feeds, session_shape(session)):
            yield GraphCall(feeds, slice(None), None), _run(session, feeds)
        return
    is_token = batch.attention_mask == 1
    ids = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if name == "encoder_model" or reference.tokens is None:
        types = np.zeros_like(batch.input_ids) if batch.token_type_ids is None else batch.token_type_ids
        for feeds in fixed_feeds({**ids, **batch.source, "token_type_ids": types}, session_shape(session)):
            yield GraphCall(feeds, slice(None), feeds["attention_mask"] == 1), _run(session, feeds)
        return
    state = _empty_caches(session, len(is_token))
    if name == "model":
        yield from _causal_calls(session, state, reference)
        return
    encoder: Any = open_onnx_session(folder / "encoder_model.onnx")
    state |= _as_past_inputs(_run(encoder, batch.source))
    for step_index, tokens in enumerate(reference.tokens):
        feeds = {"input_ids": tokens[:, None], "encoder_attention_mask": batch.attention_mask, **state}
        call_outputs = _run(session, feeds)
        yield (
            GraphCall(feeds, slice(step_index, step_index + 1), np.ones((len(is_token), 1), dtype=bool)),
            call_outputs,
        )
        state |= _as_past_inputs(call_outputs)


def _causal_calls(
    session: Any, state: TensorsByName, reference: TorchReference
) -> Iterator[tuple[GraphCall, TensorsByName]]:
    assert reference.tokens is not None
    batch, length = reference.batch, _cache_length(session)
    ids = np.concatenate([batch.input_ids, reference.tokens[1:].T], axis=1)
    mask = np.concatenate([batch.attention_mask, np.ones_like(reference.tokens[1:].T)], axis=1)
    prompt, total = batch.input_ids.shape[1] - 1, ids.shape[1]
    stretches = [(0, prompt), *((position, position + 1) for position in range(prompt, total))]
    for begin, end in stretches:
        if end > begin:
            positions = position_ids(mask[:, :end])[:, begin:]
            feeds = {
                "input_ids": ids[:, begin:end],
                "attention_mask": mask[:, :end],
                "position_ids": positions,
            }
            feeds |= {"num_logits_to_keep": np.array(0, dtype=np.int64), **state}
            feeds = {**cache_feeds(feeds, length)}
            call_outputs = _run(session, feeds)
            yield GraphCall(feeds, slice(begin, end), mask[:, begin:end] == 1), call_outputs
            state = _as_past_inputs(call_outputs)


def _run(session: Any, feeds: TensorsByName) -> TensorsByName:
    names = [i.name for i in session.get_inputs()]
    results = session.run(None, {name: np.asarray(feeds[name], order="C") for name in names})
    return dict(zip([o.name for o in session.get_outputs()], results, strict=True))


def _empty_caches(session: Any, rows: int) -> TensorsByName:
    caches = [i for i in session.get_inputs() if i.name.startswith("past_key_values.")]
    self_caches = [i for i in caches if ".encoder." not in i.name]
    cache_dtypes = {i.name: np.int8 if i.type == "tensor(int8)" else np.float32 for i in self_caches}
    length = _cache_length(session) or 0
    return {
        i.name: np.zeros((rows, i.shape[1], length, i.shape[3]), dtype=cache_dtypes[i.name])
        for i in self_caches
    }


def _cache_length(session: Any) -> int | None:
    return fixed_cache_length({i.name: i.shape for i in session.get_inputs()})


def _as_past_inputs(outputs: TensorsByName) -> TensorsByName:
    """Return the caches among `outputs` under the names of the next call's inputs."""
    prefix = "present."
    return {f"past_key_values.{n[len(prefix) :]}": v for n, v in outputs.items() if n.startswith(prefix)}
