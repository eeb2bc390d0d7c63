"""Export int8 caches for the onnx stage: calibrate scales, convert the float32 graph, and compare it.

Scales are the largest keys and values on samples of the data. The float32 graph itself is run, one sample at
a time, without padding. Keys are cached after rotary positions, which rotate pairs of numbers of a head by an
angle that grows with the position: samples of a few hundred tokens do not cover slowly rotating pairs. So a
rotated pair counts by its length, which does not depend on the position.

Each GroupQueryAttention gets scales for its keys and values: new ones become
clip(round(x / scale), -128, 127), half to even, keys after rotary positions, and attention reads
int8 value * scale (measured: docs/measurements/int8-caches.md). Source: ONNX Runtime's
docs/ContribOperators.md, GroupQueryAttention, `k_quant_type`, `v_quant_type`, `kv_cache_bit_width`,
`k_scale`, `v_scale`.

The converted graph is checked: every attention against numpy, and the logits against float caches. Rounding
changes all logits, by as much as a wrong graph may. So on real samples each attention is checked
exactly on its own inputs: its new int8 values must be those of numpy with the calibrated scales of this
layer, and its output must be attention over the dequantized values.

Shapes: B = batch, S = new tokens, or tokens of a row, P = past length, T = P + S, H = query heads, K = key-
value heads, d = width of a head, M = positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, ParityError, RunError
from smelt.data.splits import Split
from smelt.export.graph_files import read_graph, write_graph
from smelt.export.parity.check_parity import ExportedModel
from smelt.export.parity.operator_checks import TensorsByName, open_with_outputs, run_graph_calls
from smelt.export.parity.references import TorchReference, check_output, logits_for
from smelt.export.settings import unsupported_head_dim, unsupported_model, unsupported_task
from smelt.generation.backend import PAST_PREFIX, PRESENT_PREFIX, Tokens, past_input_name
from smelt.generation.generating_runners import NUM_LOGITS_INPUT
from smelt.stage import Context

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
    attention_nodes = [_read_attention(node, scales, constants, folder) for node in nodes]
    session = open_with_outputs(model, folder, name, _checked_values(attention_nodes))
    counts = {"codes": 0, "rounded_otherwise": 0, "attention": 0.0}
    for call, call_outputs in run_graph_calls(session, folder, name, reference):
        values = {**call.feeds, **call_outputs}
        assert call.token_mask is not None
        for attention in attention_nodes:
            _compare(name, attention, values, call.token_mask, counts)
    if counts["rounded_otherwise"] > 1 + _MAX_ROUNDING_SHARE * counts["codes"]:
        raise ParityError(
            f"{name}: {counts['rounded_otherwise']} of {counts['codes']} int8 values of the KV cache "
            "differ by"
            f" 1 from numpy's; the limit is a fraction of {_MAX_ROUNDING_SHARE:g}. Set kv_cache: float.",
            code="rounding-mismatch",
            file=f"{name}.onnx",
        )
    return counts


def _read_attention(
    node_and_outputs: tuple[Any, str, str],
    scales: Mapping[str, AnyArray],
    constants: Mapping[str, Any],
    folder: Path,
) -> _AttentionNode:
    from onnx import helper, numpy_helper

    node, *outputs = node_and_outputs
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    tables = None
    if attributes.get("do_rotary"):
        cos, sin = (
            numpy_helper.to_array(constants[node.input[input_index]], str(folder)) for input_index in (7, 8)
        )
        tables = (cos, sin)
    return _AttentionNode(
        node, attributes, tables, (scales[outputs[0]], scales[outputs[1]]), (outputs[0], outputs[1])
    )


def _checked_values(asked: list[_AttentionNode]) -> list[str]:
    """Return the names of the inputs and outputs of attentions that are compared."""
    nodes = [attention.node for attention in asked]
    return [name for node in nodes for name in (*node.input[:3], node.input[10], node.output[0])]


def _compare(
    graph: str, attention: _AttentionNode, values: TensorsByName, real: AnyArray, counts: dict[str, Any]
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
    for output, new, cached_codes, scale in zip(
        attention.outputs, (k, v), codes, attention.scales, strict=True
    ):
        expected = np.clip(np.rint(new / scale), -128, 127).astype(np.int16)
        off = np.abs(expected - cached_codes[:, :, past:])[text]
        if off.max(initial=0) > 1 or not np.array_equal(
            cached_codes[:, :, :past], values[past_input_name(output)]
        ):
            raise ParityError(
                f"{node}: int8 values of {output} differ from numpy's by up to {int(off.max())}. Set"
                " kv_cache: float.",
                code="cache-mismatch",
                file=f"{graph}.onnx",
            )
        counts["codes"] += off.size
        counts["rounded_otherwise"] += int(off.sum())
    floats = [cached_codes * scale for cached_codes, scale in zip(codes, attention.scales, strict=True)]
    expected = _reference_attention(
        q, floats[0], floats[1], values[attention.node.input[10]], attention.attributes
    )
    actual = values[attention.node.output[0]]
    std = float(np.std(expected[real])) or 1.0
    off = float(np.abs(expected - actual)[real].max(initial=0.0)) / std
    if not off <= _TOLERANCE:
        raise ParityError(
            f"{node} differs from attention over its dequantized KV cache by {off:.3g} standard deviations of"
            f" the output; the limit is {_TOLERANCE:g}. Set kv_cache: float.",
            code="attention-mismatch",
            file=f"{graph}.onnx",
        )
    counts["attention"] = max(counts["attention"], off)


def _split_heads(attention: _AttentionNode, values: TensorsByName) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Return queries float32 [B, H, S, d], and keys and values [B, K, S, d], from the node's inputs."""
    projections = [values[name] for name in attention.node.input[:3] if name]
    queries, keys = attention.attributes["num_heads"], attention.attributes["kv_num_heads"]
    width = attention.scales[0].shape[2]
    if len(projections) == 1:
        projections = np.split(projections[0], [queries * width, (queries + keys) * width], axis=2)
    q, k, v = (x.reshape(*x.shape[:2], -1, width).swapaxes(1, 2) for x in projections)
    return q, k, v


def _apply_rotary(x: AnyArray, cos: AnyArray, sin: AnyArray) -> AnyArray:
    half = cos.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


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


Float32Array = NDArray[np.float32]
# of the calibration texts: rows, and tokens of the longest
CACHE_CALIBRATION_ROWS, CACHE_CALIBRATION_LENGTH = 32, 256
_MAX_CODE = 127
_CHARACTERS_PER_TOKEN = 16  # characters of text per wanted token: more than tokens have


def cache_calibration_split(data: Mapping[str, Split]) -> str:
    """Return the name of the split for calibration: calibration if it exists, otherwise train.

    Raises:
        InputError: neither exists.
    """
    split_name = next((name for name in ("calibration", "train") if name in data and len(data[name])), None)
    if split_name is None:
        raise InputError(
            "onnx: kv_cache: int8 needs calibration or train data for its scales. Add data:"
            " {calibration: FILE}, or set kv_cache: float.",
            code="no-calibration-data",
        )
    return split_name


def cache_calibration_rows(split: Split, tokenizer: Any, limit: int) -> list[Tokens]:
    """Return rows of token ids, int64 [S], spread over `split`.

    There are up to `CACHE_CALIBRATION_ROWS` rows, with S <= `CACHE_CALIBRATION_LENGTH`.

    Args:
        split: samples of running text.
        tokenizer: of transformers.
        limit: the model's maximum number of tokens.

    Raises:
        InputError: the text has no token.
    """
    examples = split.examples
    separator = split.windows.separator if split.windows is not None else None
    max_tokens = min(CACHE_CALIBRATION_LENGTH, limit)
    samples = []
    for index in dict.fromkeys(
        np.linspace(0, len(examples) - 1, CACHE_CALIBRATION_ROWS).astype(int).tolist()
    ):
        text = examples[index].text
        for other in examples[index + 1 :]:
            if len(text) >= max_tokens * _CHARACTERS_PER_TOKEN:
                break
            text += ("\n\n" if separator is None else separator) + other.text
        ids = tokenizer(text[: max_tokens * _CHARACTERS_PER_TOKEN], verbose=False)["input_ids"][:max_tokens]
        if ids:
            samples.append(np.asarray(ids, dtype=np.int64))
    if not samples:
        raise InputError(
            f"{split.origin}: onnx: kv_cache: int8: the samples contain no tokens to calibrate scales on."
            f" Use another file.",
            code="empty-text",
        )
    return samples


def max_cache_magnitudes(
    session: Any, token_rows: Sequence[Tokens], rotated: Collection[str], name: str
) -> dict[str, Float32Array]:
    """Run a decoder's float32 graph on `token_rows`; return the largest magnitudes [K, d] of each cache.

    Args:
        session: of ONNX Runtime, for the graph.
        token_rows: token ids, int64 [S].
        rotated: outputs whose two halves of a head are rotated into each other: both numbers of a pair get
            the largest length of the pair.
        name: of the split, for the message.

    Raises:
        RunError: a value is not finite.
    """
    outputs = [output.name for output in session.get_outputs() if output.name.startswith(PRESENT_PREFIX)]
    caches = [input_value for input_value in session.get_inputs() if input_value.name.startswith(PAST_PREFIX)]
    empty = {cache.name: np.zeros((1, cache.shape[1], 0, cache.shape[3]), np.float32) for cache in caches}
    magnitudes: dict[str, Float32Array] = {}
    for ids in token_rows:
        feeds = {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64), **empty}
        feeds |= {"position_ids": np.arange(len(ids))[None], NUM_LOGITS_INPUT: np.array(1, np.int64)}
        for output, cache_value in zip(outputs, session.run(outputs, feeds), strict=True):
            values = np.abs(cache_value[0])  # [K, S, d]
            if output in rotated:
                length = np.hypot(*np.split(values, 2, axis=2))
                values = np.concatenate([length, length], axis=2)
            largest = values.max(axis=1)
            if not np.isfinite(largest).all():
                raise RunError(
                    f"onnx: kv_cache: int8: {output} contains NaN or infinite values on the {name}"
                    " samples, so it has no scale. Check the model's weights, or set kv_cache: float to"
                    " export the model anyway.",
                    code="non-finite-outputs",
                )
            magnitudes[output] = np.maximum(magnitudes.get(output, largest), largest)
    return magnitudes


def cache_scales(largest: Float32Array) -> Float32Array:
    """Return the scales float32 [K, 1, d] of a cache whose magnitudes were at most `largest` [K, d].

    A channel that was always 0 gets the largest scale of the cache, or 1 / 127 if all were: its values on
    other texts are then coarse, but not clipped to 0.
    """
    scales = (largest / np.float32(_MAX_CODE)).astype(np.float32)
    usable = scales >= np.finfo(np.float32).tiny  # smaller values cannot be divisors
    fallback_scale = scales[usable].max(initial=0.0) or 1.0 / _MAX_CODE
    return np.where(usable, scales, np.float32(fallback_scale))[:, None]


ATTENTION_OP = "GroupQueryAttention"
_PER_CHANNEL, _BITS = "PER_CHANNEL", 8
# indices of the operator's inputs and outputs
_PAST_INPUTS, _SCALE_INPUTS, _PRESENT_OUTPUTS = (3, 4), (12, 13), (1, 2)


def cached_attentions(model: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield the attentions of an onnx.ModelProto, each with the outputs that are its keys and values.

    Raises:
        RunError: caches are connected in an unsupported way, or a cache does not belong to such an operator.
    """
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    unmatched = {value.name for value in model.graph.output if value.name.startswith(PRESENT_PREFIX)}
    for node in model.graph.node:
        if node.op_type != ATTENTION_OP:
            continue
        past_inputs, outputs = (
            [node.input[slot] for slot in _PAST_INPUTS],
            [node.output[slot] for slot in _PRESENT_OUTPUTS],
        )
        if (
            not ends.issuperset(past_inputs)
            or not ends.issuperset(outputs)
            or past_inputs != [past_input_name(n) for n in outputs]
        ):
            raise RunError(
                f"onnx: kv_cache: int8: the caches {', '.join(past_inputs)} and {', '.join(outputs)} of node"
                f" '{node.name}' do not match the graph's inputs and outputs one to one. Set kv_cache:"
                " float.",
                code="crossed-caches",
            )
        unmatched -= set(outputs)
        yield node, outputs[0], outputs[1]
    if unmatched:
        raise RunError(
            f"onnx: kv_cache: int8: the caches {', '.join(sorted(unmatched))} do not belong to any "
            f"{ATTENTION_OP}"
            f" node. Set kv_cache: float.",
            code="unsupported-cache",
        )


def rotated_keys(model: Any) -> set[str]:
    """Return the outputs of an onnx.ModelProto that are keys rotated by the operator."""
    return {
        keys
        for node, keys, _ in cached_attentions(model)
        if any(a.name == "do_rotary" and a.i for a in node.attribute)
    }


def quantize_kv_cache(model: Any, scales: Mapping[str, Float32Array]) -> None:
    """Convert the caches of an onnx.ModelProto to int8, in place.

    Args:
        model: a decoder's graph with float32 caches.
        scales: float32 [K, 1, d] of each cache, by the name of its output.

    Raises:
        RunError: the structure of the graph is not supported.
    """
    from onnx import TensorProto, helper, numpy_helper

    for node, *outputs in list(cached_attentions(model)):
        names = [f"{past_input_name(output)}_scale" for output in outputs]
        for output, name in zip(outputs, names, strict=True):
            model.graph.initializer.append(numpy_helper.from_array(scales[output], name))
        node.input.extend([""] * (_SCALE_INPUTS[0] - len(node.input)))
        node.input.extend(names)
        attributes = {"k_quant_type": _PER_CHANNEL, "v_quant_type": _PER_CHANNEL, "kv_cache_bit_width": _BITS}
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.name.startswith((PAST_PREFIX, PRESENT_PREFIX)):
            value.type.tensor_type.elem_type = TensorProto.INT8


def has_int8_caches(model: Any) -> bool:
    """Return whether an onnx.ModelProto has int8 caches."""
    from onnx import TensorProto

    caches = (value for value in model.graph.input if value.name.startswith(PAST_PREFIX))
    return any(value.type.tensor_type.elem_type == TensorProto.INT8 for value in caches)


INT8_CACHE = "int8"


def require_int8_caches(attentions: Any, config: Any, ctx: Context) -> None:
    """Require, before tracing, a model whose caches can be int8.

    Args:
        attentions: the `AttentionModule`s of the model.
        config: config.json of the model.
        ctx: with task and data.

    Raises:
        InputError: the task, the heads or the data do not fit.
    """
    widths = [(attention.heads.head_dim, attention.rotary_dim) for attention in attentions]
    unsupported = unsupported_task(ctx.task) or unsupported_model(config)
    if reason := unsupported or next(filter(None, (unsupported_head_dim(*head) for head in widths)), None):
        code = "unsupported-task" if unsupported_task(ctx.task) else "unsupported-cache"
        raise InputError(f"onnx: kv_cache: int8: {reason}", code=code, setting="kv_cache")
    cache_calibration_split(ctx.data)


def export_int8_cache(subject: ExportedModel, reference: TorchReference, source: Path, ctx: Context) -> None:
    """Convert keys and values of the finished graph in `ctx.out` to int8, in place; compare it.

    Args:
        subject: the graph, which passed the parity check.
        reference: the samples of the parity check.
        source: the folder with the tokenizer.
        ctx: gets details: the samples, the cache bytes per token, and the results of the comparison.

    Raises:
        InputError: there are no samples, or no text in them.
        RunError: a value is not finite, the structure of the graph is not supported, or ONNX Runtime does not
            support such caches.
        ParityError: the outputs differ.
    """
    name = subject.graphs[-1].name
    path = subject.folder / f"{name}.onnx"
    scales = _cache_scales(path, source, ctx)
    float_logits = _graph_logits(subject, reference)
    model = read_graph(path, values=False)
    quantize_kv_cache(model, scales)
    write_graph(model, path)
    try:
        check_counts = check_int8_caches(
            subject.folder, name, list(cached_attentions(model)), scales, reference
        )
    except InputError as error:
        raise RunError(
            f"onnx: kv_cache: int8: {error} Tested with ONNX Runtime 1.31 and newer. Update onnxruntime, or"
            " set kv_cache: float.",
            code="unsupported-operator",
        ) from error
    logits_difference = check_output(
        name, "logits", float_logits, _graph_logits(subject, reference), "int8-caches"
    )
    num_scales = sum(scale.size for scale in scales.values())
    ctx.details["kv_cache"] |= {
        "bytes_per_token": {"float32": 4 * num_scales, INT8_CACHE: num_scales},
        "against_float": logits_difference,
        **check_counts,
    }


def _cache_scales(path: Path, source: Path, ctx: Context) -> dict[str, Float32Array]:
    from smelt.core.files import read_json_object
    from smelt.models.checkpoint import load_tokenizer
    from smelt.models.text_rules import max_input_length
    from smelt.runtimes.onnx_session import open_onnx_session

    split, tokenizer = cache_calibration_split(ctx.data), load_tokenizer(source)
    limit = max_input_length(tokenizer, read_json_object(source / "config.json"))
    token_rows = cache_calibration_rows(ctx.data[split], tokenizer, limit)
    rotated = rotated_keys(read_graph(path, values=False))
    largest = max_cache_magnitudes(open_onnx_session(path, ctx.threads), token_rows, rotated, split)
    ctx.details["kv_cache"] = {
        "dtype": INT8_CACHE,
        "split": split,
        "rows": len(token_rows),
        "tokens": sum(map(len, token_rows)),
    }
    return {output: cache_scales(values) for output, values in largest.items()}


def _graph_logits(subject: ExportedModel, reference: TorchReference) -> Any:
    """Return the logits of the graph of a step in its folder."""
    from smelt.runtimes.registry import open_folder

    with open_folder(subject.folder, "onnx", subject.target, subject.threads) as runner:
        return logits_for(runner, reference)
