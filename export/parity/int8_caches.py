"""Graphs with int8 caches: every attention against numpy, and how far the logits are from float caches'.

Rounding moves all logits, by as much as a wrong graph may; so what can be compared exactly is: on real rows
each attention is asked with what it was given itself. Its new codes must be those of numpy, found with the
scales that were calibrated for this layer, and its output must be attention over codes times scales.

Shapes: B = batch, S = tokens fed, P = past length, T = P + S, H = query heads, K = key-value heads, d = width
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
from smelt.export.graph_files import data_names, read_graph, write_graph
from smelt.export.parity.calls import Values, calls
from smelt.export.parity.reference import Reference
from smelt.runtime.backends.backend import past_of

Array = NDArray[Any]
# of codes: a quotient that lies at a half may round to either side where a rotation is summed otherwise
_ROUNDED_OTHERWISE = 1e-3
_ALLOWED = 1e-4  # of the standard deviation of an attention's output


@dataclass(frozen=True)
class _Attention:
    """A node, and what it ought to compute with.

    said: its attributes. tables: cosines and sines [M, d / 2], None where it rotates nothing. scales: those
    of keys and of values that were calibrated, float32 [K, 1, d]. outputs: names of the keys and values that
    it leaves.
    """

    node: Any
    said: Mapping[str, Any]
    tables: tuple[Array, Array] | None
    scales: tuple[Array, Array]
    outputs: tuple[str, str]


def check_int8_caches(
    folder: Path,
    name: str,
    nodes: list[tuple[Any, str, str]],
    scales: Mapping[str, Array],
    reference: Reference,
) -> dict[str, Any]:
    """Compare every attention of the graph `name` in `folder` with numpy; return what was compared.

    Args:
        folder: with the graph.
        name: of the graph, without `.onnx`.
        nodes: its attentions with the outputs that their keys and values are.
        scales: that were found for these outputs, float32 [K, 1, d].
        reference: prompts, padded on the left, and the tokens that follow.

    Returns:
        codes: how many were compared. rounded_otherwise: how many are one off. attention: the largest
        difference of an output, relative to its standard deviation.

    Raises:
        ParityError: node, and what of it differs.
    """
    model = read_graph(folder / f"{name}.onnx", values=False)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    asked = [_attention(one, scales, constants, folder) for one in nodes]
    session = _exposed(folder, name, model, asked)
    found = {"codes": 0, "rounded_otherwise": 0, "attention": 0.0}
    for call, got in calls(session, folder, name, reference):
        values = {**call.feeds, **got}
        assert call.real is not None
        for one in asked:
            _compare(name, one, values, call.real, found)
    if found["rounded_otherwise"] > 1 + _ROUNDED_OTHERWISE * found["codes"]:
        raise ParityError(
            f"{name}: {found['rounded_otherwise']} of {found['codes']} codes of its caches are one off from"
            f" numpy's, allowed {_ROUNDED_OTHERWISE:g} of them.",
            code="rounding-mismatch",
            file=f"{name}.onnx",
        )
    return found


def _attention(
    one: tuple[Any, str, str], scales: Mapping[str, Array], constants: Mapping[str, Any], folder: Path
) -> _Attention:
    from onnx import helper, numpy_helper

    node, *outputs = one
    said = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    tables = None
    if said.get("do_rotary"):
        cos, sin = (numpy_helper.to_array(constants[node.input[at]], str(folder)) for at in (7, 8))
        tables = (cos, sin)
    return _Attention(node, said, tables, (scales[outputs[0]], scales[outputs[1]]), (outputs[0], outputs[1]))


def _exposed(folder: Path, name: str, model: Any, asked: list[_Attention]) -> Any:
    """Open `model`, whose weights may lie in `folder`, with what its attentions read and give as outputs."""
    from onnx import ValueInfoProto

    from smelt.runtime.backends.onnx_session import open_session

    known = {value.name for value in (*model.graph.input, *model.graph.output, *model.graph.initializer)}
    read = [name for one in asked for name in (*one.node.input[:3], one.node.input[10], one.node.output[0])]
    model.graph.output.extend(ValueInfoProto(name=n) for n in dict.fromkeys(read) if n and n not in known)
    with TemporaryDirectory(dir=folder) as beside:
        for data in data_names(model):
            Path(beside, data).hardlink_to(folder / data)
        write_graph(model, Path(beside, f"{name}.onnx"))
        return open_session(Path(beside, f"{name}.onnx"))


def _compare(graph: str, one: _Attention, values: Values, real: Array, found: dict[str, Any]) -> None:
    """Compare one call of one attention; real: bool [B, S], where no padding is."""
    node = f"{graph}: node '{one.node.name}' ({one.node.op_type})"
    q, k, v = _heads(one, values)
    fed = q.shape[2]
    codes = [values[output] for output in one.outputs]
    past = codes[0].shape[2] - fed
    if one.tables is not None:
        cos, sin = (table[past : past + fed] for table in one.tables)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    text = np.broadcast_to(real[:, None], k.shape[:3])
    for output, new, kept, scale in zip(one.outputs, (k, v), codes, one.scales, strict=True):
        ought = np.clip(np.rint(new / scale), -128, 127).astype(np.int16)
        off = np.abs(ought - kept[:, :, past:])[text]
        if off.max(initial=0) > 1 or not np.array_equal(kept[:, :, :past], values[past_of(output)]):
            raise ParityError(
                f"{node}: {output} holds other codes than numpy: {int(off.max())} off.",
                code="cache-mismatch",
                file=f"{graph}.onnx",
            )
        found["codes"] += off.size
        found["rounded_otherwise"] += int(off.sum())
    floats = [kept * scale for kept, scale in zip(codes, one.scales, strict=True)]
    ought = _attended(q, floats[0], floats[1], values[one.node.input[10]], one.said)
    got = values[one.node.output[0]]
    spread = float(np.std(ought[real])) or 1.0
    off = float(np.abs(ought - got)[real].max(initial=0.0)) / spread
    if not off <= _ALLOWED:
        raise ParityError(
            f"{node} differs from attention over its codes times their scales: by {off:.3g} of the output's"
            f" standard deviation, allowed {_ALLOWED:g}.",
            code="attention-mismatch",
            file=f"{graph}.onnx",
        )
    found["attention"] = max(found["attention"], off)


def _heads(one: _Attention, values: Values) -> tuple[Array, Array, Array]:
    """Return queries float32 [B, H, S, d], keys and values [B, K, S, d] as the node is given them."""
    given = [values[name] for name in one.node.input[:3] if name]
    queries, keys = one.said["num_heads"], one.said["kv_num_heads"]
    width = one.scales[0].shape[2]
    if len(given) == 1:
        given = np.split(given[0], [queries * width, (queries + keys) * width], axis=2)
    q, k, v = (x.reshape(*x.shape[:2], -1, width).swapaxes(1, 2) for x in given)
    return q, k, v


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attended(q: Array, keys: Array, values: Array, bias: Array, said: Mapping[str, Any]) -> Array:
    """Return [B, S, H * d]: causal attention of queries [B, H, S, d] over keys and values [B, K, T, d]."""
    fed, total = q.shape[2], keys.shape[2]
    keys, values = (np.repeat(x.astype(np.float64), q.shape[1] // x.shape[1], axis=1) for x in (keys, values))
    behind = np.arange(total - fed, total)[:, None] - np.arange(total)[None]
    window = said.get("local_window_size", -1)
    hidden = (behind < 0) | (behind >= (window if window > 0 else total))
    scores = q @ keys.swapaxes(2, 3) * said["scale"] + bias + np.where(hidden, -1e30, 0.0)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: Array = (weights / weights.sum(axis=-1, keepdims=True)) @ values
    return out.swapaxes(1, 2).reshape(q.shape[0], fed, -1)
