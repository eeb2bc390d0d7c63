"""Check graphs with int8 caches: every attention against numpy, and the logits against float caches.

Rounding changes all logits, by as much as a wrong graph may. So on real samples each attention is checked
exactly on its own inputs: its new int8 values must be those of numpy with the calibrated scales of this
layer, and its output must be attention over the dequantized values.

Shapes: B = batch, S = new tokens, P = past length, T = P + S, H = query heads, K = key-value heads, d = width
of a head, M = positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import ParityError
from smelt.export.graph_files import external_data_names, read_graph, write_graph
from smelt.export.parity.operator_checks import TensorsByName, run_graph_calls
from smelt.export.parity.torch_reference import TorchReference
from smelt.runtimes.backend import past_input_name

AnyArray = NDArray[Any]
# a quotient near a half may round to either side if a rotation is summed in another order
_MAX_ROUNDING_SHARE = 1e-3
_TOLERANCE = 1e-4  # of the standard deviation of an attention's output


@dataclass(frozen=True)
class _AttentionNode:
    """A node and its expected constants.

    attributes: its attributes. tables: cosines and sines [M, d / 2], None without rotation. scales: the
    calibrated ones of keys and of values, float32 [K, 1, d]. outputs: names of its output keys and values.
    """

    node: Any
    attributes: Mapping[str, Any]
    tables: tuple[AnyArray, AnyArray] | None
    scales: tuple[AnyArray, AnyArray]
    outputs: tuple[str, str]


def check_int8_caches(
    folder: Path,
    name: str,
    nodes: list[tuple[Any, str, str]],
    scales: Mapping[str, AnyArray],
    reference: TorchReference,
) -> dict[str, Any]:
    """Compare every attention of the graph `name` in `folder` with numpy; return the results.

    Args:
        folder: with the graph.
        name: of the graph, without `.onnx`.
        nodes: its attentions with the outputs that are their keys and values.
        scales: calibrated for these outputs, float32 [K, 1, d].
        reference: prompts, padded on the left, and the tokens that follow.

    Returns:
        codes: number of compared int8 values. rounded_otherwise: how many are off by one. attention: the
        largest difference of an output, relative to its standard deviation.

    Raises:
        ParityError: node, and what differs.
    """
    model = read_graph(folder / f"{name}.onnx", values=False)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    asked = [_read_attention(node, scales, constants, folder) for node in nodes]
    session = _open_with_outputs(folder, name, model, asked)
    found = {"codes": 0, "rounded_otherwise": 0, "attention": 0.0}
    for call, got in run_graph_calls(session, folder, name, reference):
        values = {**call.feeds, **got}
        assert call.token_mask is not None
        for attention in asked:
            _compare(name, attention, values, call.token_mask, found)
    if found["rounded_otherwise"] > 1 + _MAX_ROUNDING_SHARE * found["codes"]:
        raise ParityError(
            f"{name}: {found['rounded_otherwise']} of {found['codes']} int8 values of the KV cache differ by"
            f" 1 from numpy's; the limit is a fraction of {_MAX_ROUNDING_SHARE:g}. Set kv_cache: float.",
            code="rounding-mismatch",
            file=f"{name}.onnx",
        )
    return found


def _read_attention(
    found: tuple[Any, str, str], scales: Mapping[str, AnyArray], constants: Mapping[str, Any], folder: Path
) -> _AttentionNode:
    from onnx import helper, numpy_helper

    node, *outputs = found
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    tables = None
    if attributes.get("do_rotary"):
        cos, sin = (numpy_helper.to_array(constants[node.input[at]], str(folder)) for at in (7, 8))
        tables = (cos, sin)
    return _AttentionNode(
        node, attributes, tables, (scales[outputs[0]], scales[outputs[1]]), (outputs[0], outputs[1])
    )


def _open_with_outputs(folder: Path, name: str, model: Any, asked: list[_AttentionNode]) -> Any:
    """Open `model` with inputs and outputs of its attentions as outputs; `folder` has its weights."""
    from onnx import ValueInfoProto

    from smelt.runtimes.onnx_session import open_onnx_session

    known = {value.name for value in (*model.graph.input, *model.graph.output, *model.graph.initializer)}
    read = [
        name
        for attention in asked
        for name in (*attention.node.input[:3], attention.node.input[10], attention.node.output[0])
    ]
    model.graph.output.extend(ValueInfoProto(name=n) for n in dict.fromkeys(read) if n and n not in known)
    with TemporaryDirectory(dir=folder) as temporary:
        for data in external_data_names(model):
            Path(temporary, data).hardlink_to(folder / data)
        write_graph(model, Path(temporary, f"{name}.onnx"))
        return open_onnx_session(Path(temporary, f"{name}.onnx"))


def _compare(
    graph: str, attention: _AttentionNode, values: TensorsByName, real: AnyArray, found: dict[str, Any]
) -> None:
    """Compare one call of one attention; real: bool [B, S], false at padding."""
    node = f"{graph}: node '{attention.node.name}' ({attention.node.op_type})"
    q, k, v = _split_heads(attention, values)
    length = q.shape[2]
    codes = [values[output] for output in attention.outputs]
    past = codes[0].shape[2] - length
    if attention.tables is not None:
        cos, sin = (table[past : past + length] for table in attention.tables)
        q, k = _apply_rotary(q, cos, sin), _apply_rotary(k, cos, sin)
    text = np.broadcast_to(real[:, None], k.shape[:3])
    for output, new, kept, scale in zip(attention.outputs, (k, v), codes, attention.scales, strict=True):
        expected = np.clip(np.rint(new / scale), -128, 127).astype(np.int16)
        off = np.abs(expected - kept[:, :, past:])[text]
        if off.max(initial=0) > 1 or not np.array_equal(kept[:, :, :past], values[past_input_name(output)]):
            raise ParityError(
                f"{node}: int8 values of {output} differ from numpy's by up to {int(off.max())}. Set"
                " kv_cache: float.",
                code="cache-mismatch",
                file=f"{graph}.onnx",
            )
        found["codes"] += off.size
        found["rounded_otherwise"] += int(off.sum())
    floats = [kept * scale for kept, scale in zip(codes, attention.scales, strict=True)]
    expected = _reference_attention(
        q, floats[0], floats[1], values[attention.node.input[10]], attention.attributes
    )
    got = values[attention.node.output[0]]
    spread = float(np.std(expected[real])) or 1.0
    off = float(np.abs(expected - got)[real].max(initial=0.0)) / spread
    if not off <= _TOLERANCE:
        raise ParityError(
            f"{node} differs from attention over its dequantized KV cache by {off:.3g} standard deviations of"
            f" the output; the limit is {_TOLERANCE:g}. Set kv_cache: float.",
            code="attention-mismatch",
            file=f"{graph}.onnx",
        )
    found["attention"] = max(found["attention"], off)


def _split_heads(attention: _AttentionNode, values: TensorsByName) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Return queries float32 [B, H, S, d], and keys and values [B, K, S, d], from the node's inputs."""
    given = [values[name] for name in attention.node.input[:3] if name]
    queries, keys = attention.attributes["num_heads"], attention.attributes["kv_num_heads"]
    width = attention.scales[0].shape[2]
    if len(given) == 1:
        given = np.split(given[0], [queries * width, (queries + keys) * width], axis=2)
    q, k, v = (x.reshape(*x.shape[:2], -1, width).swapaxes(1, 2) for x in given)
    return q, k, v


def _apply_rotary(x: AnyArray, cos: AnyArray, sin: AnyArray) -> AnyArray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _reference_attention(
    q: AnyArray, keys: AnyArray, values: AnyArray, bias: AnyArray, attributes: Mapping[str, Any]
) -> AnyArray:
    """Return [B, S, H * d]: causal attention of queries [B, H, S, d] over keys and values [B, K, T, d]."""
    length, total = q.shape[2], keys.shape[2]
    keys, values = (np.repeat(x.astype(np.float64), q.shape[1] // x.shape[1], axis=1) for x in (keys, values))
    distance = np.arange(total - length, total)[:, None] - np.arange(total)[None]
    window = attributes.get("local_window_size", -1)
    hidden = (distance < 0) | (distance >= (window if window > 0 else total))
    scores = q @ keys.swapaxes(2, 3) * attributes["scale"] + bias + np.where(hidden, -1e30, 0.0)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: AnyArray = (weights / weights.sum(axis=-1, keepdims=True)) @ values
    return out.swapaxes(1, 2).reshape(q.shape[0], length, -1)
