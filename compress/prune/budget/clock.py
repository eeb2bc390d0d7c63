"""How long a part of a block takes on this machine: products, attention, activation, on random numbers.

A part is made in the runtime that is wanted with the sizes that it would have, and timed alone. ZipLM
(Kurtic et al. 2023, arXiv:2302.04089, section 3.2) times attentions with each number of heads and
feed-forward parts of many widths so, and chooses among them.

Shapes: T = tokens that are computed, S = tokens that they look at, G = keys, Q = queries of a key, W = width
of a head, K = inputs, N = outputs of a product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from smelt.compress.prune.budget.sizes import Product
from smelt.compress.train.state import threads as torch_threads
from smelt.runtime.layers.low_rank import LowRankLinear

# Parts are run in turns, each for so many runs at least and so many seconds; of all turns the fastest run
# counts, which whatever else the machine does disturbs least.
TURNS, RUNS, SECONDS = 3, 3, 0.01
_OPSET, _FUSED = 21, "com.microsoft"


@dataclass(frozen=True)
class Heads:
    """An attention between two products: `keys` keys of `queries` queries each, `width` wide, over `seen`.

    cached: keys and values of the tokens before are there already, and only those of the new ones are made.
    """

    keys: int
    queries: int
    width: int
    seen: int
    cached: bool = False


@dataclass(frozen=True)
class Part:
    """Something that is timed: products of the same input [tokens, K], what is between, a product of that.

    heads: what is between, or the function `activation` (relu, gelu, silu); neither where only `first` is
    computed. gated: two of the first products are multiplied with each other.
    """

    tokens: int
    first: tuple[Product, ...]
    last: Product | None = None
    heads: Heads | None = None
    activation: str = "relu"
    gated: bool = False


def seconds_of(parts: Sequence[Part], on: str, threads: int) -> list[float]:
    """Return how long each of `parts` takes, the fastest of its runs.

    Args:
        parts: what is timed; their weights are in memory together.
        on: ort-cpu, ort-cpu-int8 or torch.
        threads: of the runtime.
    """
    calls = [
        _InTorch(part) if on == "torch" else _onnx_call(part, on == "ort-cpu-int8", threads) for part in parts
    ]
    best = [float("inf")] * len(calls)
    with torch_threads(threads):
        for _ in range(TURNS):
            for at, call in enumerate(calls):
                best[at] = min(best[at], _fastest(call))
    return best


def _fastest(call: Callable[[], Any]) -> float:
    call()  # what the one before it left in the caches is another's
    best, until, runs = float("inf"), time.perf_counter() + SECONDS, 0
    while runs < RUNS or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
        runs += 1
    return best


def _onnx_call(part: Part, int8: bool, threads: int) -> Callable[[], Any]:
    import onnxruntime

    from smelt.runtime.backends.onnx_session import session_options

    graph = _Graph(part, int8)
    session = onnxruntime.InferenceSession(
        graph.model().SerializeToString(), session_options(threads), providers=["CPUExecutionProvider"]
    )
    return partial(session.run, None, graph.feeds)


class _InTorch:
    """One part in torch; calling it computes it."""

    def __init__(self, part: Part) -> None:
        import torch

        self._part = part
        self._x = torch.randn(part.tokens, part.first[0].inputs)
        self._first = [_layer(product) for product in part.first]
        self._last = None if part.last is None else _layer(part.last)
        heads = part.heads
        self._seen = None if heads is None else torch.randn(1, heads.keys, heads.seen, heads.width)

    def __call__(self) -> Any:
        import torch

        with torch.inference_mode():
            found = [layer(self._x) for layer in self._first]
            if self._last is None:
                return found
            return self._last(self._attended(found) if self._part.heads else self._activated(found))

    def _attended(self, found: list[Any]) -> Any:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        heads, tokens = self._part.heads, self._part.tokens
        assert heads is not None
        wide, narrow = heads.keys * heads.queries * heads.width, heads.keys * heads.width
        made = torch.cat(found, dim=1)
        query = made[:, :wide].view(1, tokens, -1, heads.width).transpose(1, 2)
        key: Any = self._seen
        value = key
        if made.shape[1] > wide and not heads.cached:
            each = [made[:, at : at + narrow] for at in (wide, wide + narrow)]
            key, value = (t.view(1, tokens, -1, heads.width).transpose(1, 2) for t in each)
        out = scaled_dot_product_attention(query, key, value, enable_gqa=heads.queries > 1)
        return out.transpose(1, 2).reshape(tokens, wide)

    def _activated(self, found: list[Any]) -> Any:
        from torch.nn import functional

        function: Any = getattr(functional, self._part.activation)
        if not self._part.gated:
            return function(found[0])
        up, gate = found if len(found) > 1 else found[0].chunk(2, dim=1)
        return function(up) * gate


def _layer(product: Product) -> Any:
    from torch import nn

    if product.rank is not None:
        return LowRankLinear(product.inputs, product.outputs, product.rank, product.bias)
    return nn.Linear(product.inputs, product.outputs, product.bias)


class _Graph:
    """A graph of one part; `feeds` are its inputs."""

    def __init__(self, part: Part, int8: bool) -> None:
        self._nodes: list[Any] = []
        self._tensors: list[Any] = []
        self._int8 = int8
        self._draw = np.random.default_rng(0)
        self.feeds: dict[str, Any] = {"x": self._random(part.tokens, part.first[0].inputs)}
        found = self._together(part.first)
        if part.last is not None:
            middle = self._heads(part, found) if part.heads else self._activated(part, found)
            found = self._product(middle, part.last)
        self._output = found

    def model(self) -> Any:
        """Return it as an onnx ModelProto."""
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, v.shape) for n, v in self.feeds.items()]
        output = helper.make_tensor_value_info(self._output, TensorProto.FLOAT, None)
        graph = helper.make_graph(self._nodes, "part", inputs, [output], self._tensors)
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_FUSED, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def _together(self, products: tuple[Product, ...]) -> str:
        """Multiply the input with all of `products`: plain ones are one product, as an export makes them."""
        if all(product.rank is None for product in products):
            outputs = sum(product.outputs for product in products)
            return self._product("x", Product(products[0].inputs, outputs, bias=products[0].bias))
        found = [self._product("x", product) for product in products]
        return self._node("Concat", *found, axis=1) if len(found) > 1 else found[0]

    def _product(self, x: str, product: Product) -> str:
        if product.rank is not None:
            x = self._product(x, Product(product.inputs, product.rank))
            return self._product(x, Product(product.rank, product.outputs, bias=product.bias))
        size, bias = (product.inputs, product.outputs), self._kept(self._random(product.outputs))
        if self._int8:
            codes = self._kept(self._draw.integers(-127, 128, size, dtype=np.int8))
            scale = self._kept(np.full(product.outputs, 0.001, dtype=np.float32))
            given = [x, codes, scale, "", *([bias] if product.bias else [])]
            return self._node("DynamicQuantizeMatMul", *given, domain=_FUSED)
        y = self._node("MatMul", x, self._kept(self._random(*size)))
        return self._node("Add", y, bias) if product.bias else y

    def _heads(self, part: Part, made: str) -> str:
        heads = part.heads
        assert heads is not None
        wide, narrow = heads.keys * heads.queries * heads.width, heads.keys * heads.width
        sizes = [wide] if sum(p.outputs for p in part.first) == wide else [wide, narrow, narrow]
        split = [made]
        if len(sizes) > 1:
            split = [f"{made}.{number}" for number in range(3)]
            cut = self._kept(np.array(sizes, dtype=np.int64))
            self._nodes.append(helper.make_node("Split", [made, cut], split, axis=1))
        # queries that share a key are rows of one product with it: [G, Q T, W]
        by_key = self._shaped(split[0], (part.tokens, heads.keys, heads.queries, heads.width), (1, 2, 0, 3))
        query = self._shaped(by_key, (heads.keys, heads.queries * part.tokens, heads.width))
        if heads.cached or len(sizes) == 1:
            key = self._fed("keys", heads.keys, heads.width, heads.seen)
            value = self._fed("values", heads.keys, heads.seen, heads.width)
        else:
            each = (part.tokens, heads.keys, heads.width)
            key = self._shaped(split[1], each, (1, 2, 0))
            value = self._shaped(split[2], each, (1, 0, 2))
        weighed = self._node("Softmax", self._node("MatMul", query, key), axis=-1)
        out = self._node("MatMul", weighed, value)
        out = self._shaped(out, (heads.keys, heads.queries, part.tokens, heads.width), (2, 0, 1, 3))
        return self._shaped(out, (part.tokens, wide))

    def _activated(self, part: Part, y: str) -> str:
        assert part.last is not None
        made, other = y, None
        if part.gated:
            y, other = (f"{made}.{number}" for number in range(2))
            cut = self._kept(np.array([part.last.inputs] * 2, dtype=np.int64))
            self._nodes.append(helper.make_node("Split", [made, cut], [y, other], axis=1))
        if part.activation == "relu":
            y = self._node("Relu", y)
        elif part.activation == "gelu":
            y = self._node("Gelu", y, domain=_FUSED)
        else:
            y = self._node("QuickGelu", y, domain=_FUSED, alpha=1.0)
        return self._node("Mul", y, other) if other else y

    def _shaped(self, x: str, shape: tuple[int, ...], turn: tuple[int, ...] | None = None) -> str:
        y = self._node("Reshape", x, self._kept(np.array(shape, dtype=np.int64)))
        return self._node("Transpose", y, perm=list(turn)) if turn else y

    def _node(self, kind: str, *inputs: str, domain: str = "", **layout: Any) -> str:
        name = f"y{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], domain=domain, **layout))
        return name

    def _fed(self, name: str, *shape: int) -> str:
        self.feeds[name] = self._random(*shape)
        return name

    def _kept(self, value: Any) -> str:
        name = f"w{len(self._tensors)}"
        self._tensors.append(numpy_helper.from_array(value, name))
        return name

    def _random(self, *shape: int) -> Any:
        return self._draw.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
