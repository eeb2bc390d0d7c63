"""Latency costs of a model: a table of timings of each kind of part, by its number of units.

A part of a block is built in the requested runtime with its pruned sizes and timed alone on this machine,
with random numbers. ZipLM (Kurtic et al. 2023, arXiv:2302.04089, section 3.2) times attentions with each
number of heads and feed-forward parts of many widths in this way, and chooses among them.

An input sequence is processed once; a generating model also generates `sequence_length` tokens one at a time.
The table holds linear layers, attentions and activations of the blocks, and the linear layers of the head.
Norms, sums and lookups are left out, because pruning does not change them.

Shapes: T = computed tokens, S = context tokens, G = key heads, Q = queries per key head, W = width of a head,
K = inputs, N = outputs of a linear layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper
from scipy.optimize import isotonic_regression
from torch import Tensor, nn

from smelt.compress.prune.costs import (
    LinearShape,
    UnitCosts,
    UnitGroup,
    blocks_using_groups,
    group_shapes,
    linear_shape,
    resolve_sequence_length,
)
from smelt.compress.prune.units import AttentionGroup
from smelt.models.families.config_keys import config_value
from smelt.models.families.registry import Block, output_modules
from smelt.models.layers import LowRankLinear
from smelt.runtimes.device import torch_threads
from smelt.stage import Context

# Parts run in turns, each for a minimum number of runs and seconds. The fastest run of all turns counts,
# because other load on the machine disturbs it least.
TIMING_ROUNDS, MIN_RUNS, MIN_SECONDS = 3, 3, 0.01
_OPSET, _FUSED = 21, "com.microsoft"


@dataclass(frozen=True)
class TimedAttention:
    """An attention: `keys` key heads with `queries` queries each, `width` wide, over `context_length` tokens.

    cached: keys and values of earlier tokens are cached, and only those of new tokens are computed.
    """

    keys: int
    queries: int
    width: int
    context_length: int
    cached: bool = False


@dataclass(frozen=True)
class TimedPart:
    """A timed part: input layers on the same input [tokens, K], attention or activation, an output layer.

    heads: the attention, or `activation` (relu, gelu, silu); neither if only `input_layers` are computed.
    gated: the outputs of two input layers are multiplied.
    """

    tokens: int
    input_layers: tuple[LinearShape, ...]
    output_layer: LinearShape | None = None
    heads: TimedAttention | None = None
    activation: str = "relu"
    gated: bool = False


def time_parts(parts: Sequence[TimedPart], runtime: str, threads: int) -> list[float]:
    """Return the time of the fastest run of each part.

    Args:
        parts: the parts to time; the weights of all are in memory together.
        runtime: ort-cpu, ort-cpu-int8 or torch.
        threads: number of threads of the runtime.
    """
    calls = [
        _TorchPart(part) if runtime == "torch" else _onnx_call(part, runtime == "ort-cpu-int8", threads)
        for part in parts
    ]
    best_times = [float("inf")] * len(calls)
    with torch_threads(threads):
        for _ in range(TIMING_ROUNDS):
            for index, call in enumerate(calls):
                best_times[index] = min(best_times[index], _best_time(call))
    return best_times


def _best_time(call: Callable[[], Any]) -> float:
    call()  # warm-up: the caches hold the data of another part
    fastest, until, runs = float("inf"), time.perf_counter() + MIN_SECONDS, 0
    while runs < MIN_RUNS or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - started)
        runs += 1
    return fastest


def _onnx_call(part: TimedPart, int8: bool, threads: int) -> Callable[[], Any]:
    import onnxruntime

    from smelt.runtimes.onnx_session import session_options

    graph = _OnnxPart(part, int8)
    session = onnxruntime.InferenceSession(
        graph.model().SerializeToString(), session_options(threads), providers=["CPUExecutionProvider"]
    )
    return partial(session.run, None, graph.feeds)


class _TorchPart:
    """One part in torch; a call runs it."""

    def __init__(self, part: TimedPart) -> None:

        self._part = part
        self._x = torch.randn(part.tokens, part.input_layers[0].inputs)
        self._first = [_make_linear(layer) for layer in part.input_layers]
        self._last = None if part.output_layer is None else _make_linear(part.output_layer)
        heads = part.heads
        self._seen = None if heads is None else torch.randn(1, heads.keys, heads.context_length, heads.width)

    def __call__(self) -> Any:

        with torch.inference_mode():
            outputs = [layer(self._x) for layer in self._first]
            if self._last is None:
                return outputs
            return self._last(self._attention(outputs) if self._part.heads else self._activation(outputs))

    def _attention(self, outputs: list[Any]) -> Any:
        from torch.nn.functional import scaled_dot_product_attention

        heads, tokens = self._part.heads, self._part.tokens
        assert heads is not None
        query_width, key_width = heads.keys * heads.queries * heads.width, heads.keys * heads.width
        projected = torch.cat(outputs, dim=1)
        query = projected[:, :query_width].view(1, tokens, -1, heads.width).transpose(1, 2)
        key: Any = self._seen
        value = key
        if projected.shape[1] > query_width and not heads.cached:
            keys_and_values = [
                projected[:, start : start + key_width] for start in (query_width, query_width + key_width)
            ]
            key, value = (t.view(1, tokens, -1, heads.width).transpose(1, 2) for t in keys_and_values)
        out = scaled_dot_product_attention(query, key, value, enable_gqa=heads.queries > 1)
        return out.transpose(1, 2).reshape(tokens, query_width)

    def _activation(self, outputs: list[Any]) -> Any:
        from torch.nn import functional

        function: Any = getattr(functional, self._part.activation)
        if not self._part.gated:
            return function(outputs[0])
        up, gate = outputs if len(outputs) > 1 else outputs[0].chunk(2, dim=1)
        return function(up) * gate


def _make_linear(product: LinearShape) -> Any:

    if product.rank is not None:
        return LowRankLinear(product.inputs, product.outputs, product.rank, product.bias)
    return nn.Linear(product.inputs, product.outputs, product.bias)


class _OnnxPart:
    """An ONNX graph of one part; `feeds` are its inputs."""

    def __init__(self, part: TimedPart, int8: bool) -> None:
        self._nodes: list[Any] = []
        self._tensors: list[Any] = []
        self._int8 = int8
        self._draw = np.random.default_rng(0)
        self.feeds: dict[str, Any] = {"x": self._random(part.tokens, part.input_layers[0].inputs)}
        output = self._input_products(part.input_layers)
        if part.output_layer is not None:
            activated = (
                self._add_attention(part, output) if part.heads else self._add_activation(part, output)
            )
            output = self._add_product(activated, part.output_layer)
        self._output = output

    def model(self) -> Any:
        """Return the graph as an ONNX ModelProto."""
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, v.shape) for n, v in self.feeds.items()]
        output = helper.make_tensor_value_info(self._output, TensorProto.FLOAT, None)
        graph = helper.make_graph(self._nodes, "part", inputs, [output], self._tensors)
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_FUSED, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def _input_products(self, products: tuple[LinearShape, ...]) -> str:
        """Add the linear layers of the input; unfactorized ones are merged into one, as in an export."""
        if all(layer.rank is None for layer in products):
            outputs = sum(layer.outputs for layer in products)
            return self._add_product("x", LinearShape(products[0].inputs, outputs, bias=products[0].bias))
        names = [self._add_product("x", layer) for layer in products]
        return self._add_node("Concat", *names, axis=1) if len(names) > 1 else names[0]

    def _add_product(self, x: str, product: LinearShape) -> str:
        if product.rank is not None:
            x = self._add_product(x, LinearShape(product.inputs, product.rank))
            return self._add_product(x, LinearShape(product.rank, product.outputs, bias=product.bias))
        size, bias = (product.inputs, product.outputs), self._add_initializer(self._random(product.outputs))
        if self._int8:
            codes = self._add_initializer(self._draw.integers(-127, 128, size, dtype=np.int8))
            scale = self._add_initializer(np.full(product.outputs, 0.001, dtype=np.float32))
            input_names = [x, codes, scale, "", *([bias] if product.bias else [])]
            return self._add_node("DynamicQuantizeMatMul", *input_names, domain=_FUSED)
        y = self._add_node("MatMul", x, self._add_initializer(self._random(*size)))
        return self._add_node("Add", y, bias) if product.bias else y

    def _add_attention(self, part: TimedPart, projected: str) -> str:
        heads = part.heads
        assert heads is not None
        query_width, key_width = heads.keys * heads.queries * heads.width, heads.keys * heads.width
        sizes = (
            [query_width]
            if sum(p.outputs for p in part.input_layers) == query_width
            else [query_width, key_width, key_width]
        )
        split = [projected]
        if len(sizes) > 1:
            split = [f"{projected}.{index}" for index in range(3)]
            split_sizes = self._add_initializer(np.array(sizes, dtype=np.int64))
            self._nodes.append(helper.make_node("Split", [projected, split_sizes], split, axis=1))
        # queries that share a key head are rows of one matrix multiplication with it: [G, Q T, W]
        by_key = self._add_reshape(
            split[0], (part.tokens, heads.keys, heads.queries, heads.width), (1, 2, 0, 3)
        )
        query = self._add_reshape(by_key, (heads.keys, heads.queries * part.tokens, heads.width))
        if heads.cached or len(sizes) == 1:
            key = self._add_input("keys", heads.keys, heads.width, heads.context_length)
            value = self._add_input("values", heads.keys, heads.context_length, heads.width)
        else:
            head_shape = (part.tokens, heads.keys, heads.width)
            key = self._add_reshape(split[1], head_shape, (1, 2, 0))
            value = self._add_reshape(split[2], head_shape, (1, 0, 2))
        weighed = self._add_node("Softmax", self._add_node("MatMul", query, key), axis=-1)
        out = self._add_node("MatMul", weighed, value)
        out = self._add_reshape(out, (heads.keys, heads.queries, part.tokens, heads.width), (2, 0, 1, 3))
        return self._add_reshape(out, (part.tokens, query_width))

    def _add_activation(self, part: TimedPart, y: str) -> str:
        assert part.output_layer is not None
        hidden, multiplier = y, None
        if part.gated:
            y, multiplier = (f"{hidden}.{index}" for index in range(2))
            split_sizes = self._add_initializer(np.array([part.output_layer.inputs] * 2, dtype=np.int64))
            self._nodes.append(helper.make_node("Split", [hidden, split_sizes], [y, multiplier], axis=1))
        if part.activation == "relu":
            y = self._add_node("Relu", y)
        elif part.activation == "gelu":
            y = self._add_node("Gelu", y, domain=_FUSED)
        else:
            y = self._add_node("QuickGelu", y, domain=_FUSED, alpha=1.0)
        return self._add_node("Mul", y, multiplier) if multiplier else y

    def _add_reshape(self, x: str, shape: tuple[int, ...], turn: tuple[int, ...] | None = None) -> str:
        y = self._add_node("Reshape", x, self._add_initializer(np.array(shape, dtype=np.int64)))
        return self._add_node("Transpose", y, perm=list(turn)) if turn else y

    def _add_node(self, kind: str, *inputs: str, domain: str = "", **layout: Any) -> str:
        name = f"y{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], domain=domain, **layout))
        return name

    def _add_input(self, name: str, *shape: int) -> str:
        self.feeds[name] = self._random(*shape)
        return name

    def _add_initializer(self, value: Any) -> str:
        name = f"w{len(self._tensors)}"
        self._tensors.append(numpy_helper.from_array(value, name))
        return name

    def _random(self, *shape: int) -> Any:
        return self._draw.standard_normal(shape, dtype=np.float32) * np.float32(0.02)


# Number of sizes that are timed of each kind of part; others are interpolated.
TIMING_POINTS = 8
# Parts, and how often each runs per sample.
TimedParts = list[tuple[TimedPart, int]]


def latency_costs(
    model: Any,
    groups: Sequence[UnitGroup],
    sequence_length: int | None,
    runtime: str,
    multiples: dict[str, int],
    ctx: Context,
    known: dict[TimedPart, float] | None = None,
) -> UnitCosts:
    """Return costs in milliseconds per sample.

    Args:
        model: float, on the CPU.
        groups: the groups of its units.
        sequence_length: tokens; None: see `resolve_sequence_length`.
        runtime: runtime of the timings: ort-cpu, ort-cpu-int8, torch.
        multiples: by group, the kept units are a multiple of this.
        ctx: threads (default one) and progress.
        known: seconds of parts that were timed before with this runtime; those of others are added.
    """
    tokens, uses = resolve_sequence_length(model, sequence_length), blocks_using_groups(model, groups)
    clock = _PartTimer(runtime, ctx.threads or 1, {} if known is None else known)
    by_group: dict[str, Tensor] = {}
    groups_by_curve: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for index, group in enumerate(groups, start=1):
        counts = _unit_counts(group.count(model), multiples[group.name])
        times = clock.ms([_timed_parts(model, group, n, uses[group.name], tokens) for n in counts])
        monotonic = np.asarray(isotonic_regression(times).x)
        curve = tuple((n, round(float(ms), 4)) for n, ms in zip(counts, monotonic, strict=True))
        groups_by_curve.setdefault(curve, []).append(group.name)
        by_group[group.name] = torch.from_numpy(
            np.interp(np.arange(group.count(model) + 1), counts, monotonic)
        )
        ctx.progress(index, len(groups), f"timings of {group.name}")
    head_ms = clock.ms([_head_parts(model, tokens)])[0]
    total_ms = head_ms + sum(float(cost[-1]) for cost in by_group.values())
    timings = [
        {"of": names, "ms": {str(n): ms for n, ms in curve}} for curve, names in groups_by_curve.items()
    ]
    details = {"sequence_length": tokens, "measure_on": runtime, "threads": clock.threads, "timings": timings}
    return UnitCosts("milliseconds", total_ms, head_ms, by_group, details)


class _PartTimer:
    """Times parts, each once. known: the seconds of those that were timed."""

    def __init__(self, on: str, threads: int, known: dict[TimedPart, float]) -> None:
        self.on, self.threads, self._known = on, threads, known

    def ms(self, sums: Sequence[TimedParts]) -> list[float]:
        """Return the total milliseconds of each of `sums`: its parts, each times its count."""
        untimed = [
            p for p in dict.fromkeys(part for parts in sums for part, _ in parts) if p not in self._known
        ]
        self._known.update(zip(untimed, time_parts(untimed, self.on, self.threads), strict=True))
        return [1000 * sum(self._known[part] * times for part, times in parts) for parts in sums]


def _unit_counts(count: int, step: int) -> list[int]:
    """Return the numbers of units to time: multiples of `step`, and all units."""
    points = np.linspace(step, count, TIMING_POINTS) if count > step else np.array([count])
    return sorted({min(count, max(step, round(n / step) * step)) for n in points} | {count})


def _timed_parts(
    model: Any, group: UnitGroup, units: int, uses: list[tuple[Block, int]], tokens: int
) -> TimedParts:
    timed_parts: TimedParts = []
    make: Callable[[Block], TimedParts]
    if isinstance(group, AttentionGroup):
        make = partial(_attention_parts, model, group, units, tokens)
    else:
        make = partial(_feed_forward_parts, model, group, units, tokens)
    for block, num_uses in uses:
        timed_parts += [(part, times * num_uses) for part, times in make(block)]
    return timed_parts


def _attention_parts(model: Any, group: AttentionGroup, units: int, tokens: int, block: Block) -> TimedParts:
    """Return the parts of an attention; a cross-attention computes keys and values once per sample."""
    sizes, attention = group_shapes(model, group, units), group.structure
    module = model.get_submodule(group.name)
    width = int(getattr(module, attention.head_dim_attribute))
    queries = sizes.inner_width // (units * width)
    visible_tokens = min(tokens, block.window or tokens)
    input_layers = tuple(layer for _, layer in sizes.input_layers)
    if not block.stack.causal:
        return [
            (
                TimedPart(
                    tokens, input_layers, sizes.output_layer, TimedAttention(units, queries, width, tokens)
                ),
                1,
            )
        ]
    if not attention.cross:  # on average half of the tokens are cached
        cached = TimedAttention(units, queries, width, max(1, min(visible_tokens, tokens // 2)), cached=True)
        return [(TimedPart(1, input_layers, sizes.output_layer, cached), tokens)]
    by_name = dict(sizes.input_layers)
    key_value = tuple(by_name[name] for name in (attention.key, attention.value))
    cross_attention = TimedAttention(units, queries, width, tokens, cached=True)
    return [
        (TimedPart(1, (by_name[attention.query],), sizes.output_layer, cross_attention), tokens),
        (TimedPart(tokens, key_value), 1),
    ]


def _feed_forward_parts(model: Any, group: Any, units: int, tokens: int, block: Block) -> TimedParts:
    sizes, parts = group_shapes(model, group, units), group.structure
    activation = str(config_value(model.config.to_dict(), parts.activation_key) or "relu")
    kind = next(
        (k for k, aliases in _ACTIVATION_ALIASES.items() if any(w in activation for w in aliases)), "relu"
    )
    input_layers = tuple(layer for _, layer in sizes.input_layers)
    num_rows, times = (1, tokens) if block.stack.causal else (tokens, 1)
    return [
        (
            TimedPart(
                num_rows, input_layers, sizes.output_layer, activation=kind, gated=parts.gate is not None
            ),
            times,
        )
    ]


# Activation functions, by the timed function that takes about as long.
_ACTIVATION_ALIASES = {"gelu": ("gelu",), "silu": ("silu", "swish", "sigmoid", "tanh")}


def _head_parts(model: Any, tokens: int) -> TimedParts:
    """Return the linear layers of the head: one row per generated token, or one per sample."""
    times = tokens if model.can_generate() else 1
    layers: list[LinearShape] = []
    for name in output_modules(model):
        if isinstance(model.get_submodule(name), torch.nn.Linear):
            layers.append(linear_shape(model, name))
    return [(TimedPart(1, (layer,)), times) for layer in layers]
