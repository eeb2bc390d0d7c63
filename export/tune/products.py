"""Which operator a quantized product leaves as: measured for its shape, on this machine, at export time.

Schemes say between which operators there is a choice (`Scheme.forms`). One may be faster for one row and
slower for eight, faster where there are few inputs and slower where there are many, and processors differ.
Beside them the same products are timed in int8-dynamic, so that a scheme which is slower than that for the
use at hand is told.

Shapes: K = inputs, N = outputs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from smelt.export.graphs.attention import Pack
from smelt.export.graphs.attention_modules import pack_projections
from smelt.export.graphs.graph import Graph
from smelt.runtime.layers.matrix import Matrix
from smelt.runtime.layers.quantized import QuantizedLinear
from smelt.runtime.schemes.registry import DEFAULT, defaults, find

# Another form than the first is taken only where it is faster by more than this share
MARGIN = 0.05
_ROUNDS = 9
_MIN_ROUND_SECONDS = 0.01
# Products of one shape with different weights run in turns, so that codes do not lie in the nearest cache
_BYTES = 4_000_000
_MOST = 32


@dataclass
class Product:
    """One matrix that is multiplied with, and what was measured.

    names: of its layers in the graphs. rows: of activations in each of its uses. us: microseconds of all uses
    by form. as_int8: those of int8-dynamic. by_graph: of the chosen form and of int8-dynamic, by graph.
    """

    matrix: Matrix
    names: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    us: dict[str, float] = field(default_factory=dict)
    as_int8: float = 0.0
    by_graph: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def forms(self) -> tuple[str, ...]:
        """The operators that it can leave as."""
        return self.matrix.scheme.forms(self.matrix.options)

    @property
    def shape(self) -> str:
        """K x N, and the rows."""
        rows = " and ".join(f"{n} row{'s' * (n != 1)}" for n in self.rows)
        return f"{self.matrix.width} x {len(self.matrix.codes)}, {rows}"


def choose_forms(
    graphs: Iterable[Graph], rows: Mapping[str, int], threads: int, stay: Iterable[Matrix] = ()
) -> dict[str, Any]:
    """Choose a form for each quantized product of `graphs`; return what the report tells of it.

    Args:
        graphs: before they are traced.
        rows: of activations that a product of each graph gets, by the graph's name.
        threads: for ONNX Runtime.
        stay: matrices that keep their first form.
    """
    graphs = list(graphs)
    products: dict[int, Product] = {}
    settled = {id(matrix) for matrix in stay}
    for graph in graphs:
        pack_projections(graph.module.attentions)
        for name, linear in multiplied(graph.module):
            if linear.matrix.scheme.forms(linear.matrix.options) and id(linear.matrix) not in settled:
                product = products.setdefault(id(linear.matrix), Product(linear.matrix))
                product.names.append(f"{graph.name}: {name}")
                product.rows.append(rows[graph.name])
    for product in products.values():
        product.us = _measured(product, threads)
        product.matrix.choose_form(choice(product.us))
        product.by_graph = _by_graph(product, threads)
        product.as_int8 = sum(as_int8 for _, as_int8 in product.by_graph.values())
    for graph in graphs:
        for pack in graph.module.modules():
            if isinstance(pack, Pack) and isinstance(pack.packed, QuantizedLinear):
                _hand_on(pack.packed.matrix, pack.firsts)
    return _facts(products.values())


def choice(us: Mapping[str, float]) -> str:
    """Return the form that is taken: the first one, unless another is faster beyond the margin."""
    first, best = next(iter(us)), min(us, key=lambda form: us[form])
    return best if us[best] < (1 - MARGIN) * us[first] else first


def multiplied(module: Any) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the quantized layers with which a graph multiplies, each once, by name.

    Not those that a packed product stands for, and in a graph that is given the keys and values of
    cross-attention not what makes them.
    """
    unused: set[int] = set()
    for one in module.attentions:
        parts = one.parts
        if parts.cross:
            unused |= _ids([one.part(parts.key), one.part(parts.value), one.module.pack.packed])
    packs = [m for m in module.modules() if isinstance(m, Pack) and m.packed is not None]
    crossed = _ids(one.part(one.parts.query) for one in module.attentions if one.parts.cross)
    unused |= {id(first) for pack in packs for first in pack.firsts} - crossed
    for name, found in module.named_modules():
        if isinstance(found, QuantizedLinear) and id(found) not in unused:
            yield name, found


def _ids(layers: Iterable[nn.Module | None]) -> set[int]:
    """Return the identities of layers and of the halves of those that are low-rank pairs."""
    return {id(module) for layer in layers if layer is not None for module in layer.modules()}


def _hand_on(matrix: Matrix, parts: Iterable[nn.Module]) -> None:
    """Let torch compute the layers of a packed product as the graph does, for the parity check."""
    for part in parts:
        if isinstance(part, QuantizedLinear) and not part.matrix.form:
            part.matrix.choose_form(matrix.form)


def _measured(product: Product, threads: int) -> dict[str, float]:
    matrix, total = product.matrix, dict.fromkeys(product.forms, 0.0)
    for rows in product.rows:
        options = tuple(matrix.options.items())
        found = measure(matrix.scheme.name, options, matrix.width, len(matrix.codes), rows, threads)
        for form, us in found.items():
            total[form] += us
    return total


def _by_graph(product: Product, threads: int) -> dict[str, tuple[float, float]]:
    """Return microseconds of the uses in each graph: in the chosen form, and in int8-dynamic's first one."""
    matrix, usual = product.matrix, defaults(find(DEFAULT))
    first, plain = find(DEFAULT).forms(usual)[0], tuple(usual.items())
    shape, options = (matrix.width, len(matrix.codes)), tuple(matrix.options.items())
    found: dict[str, tuple[float, float]] = {}
    for name, rows in zip(product.names, product.rows, strict=True):
        graph = name.partition(": ")[0]
        own = measure(matrix.scheme.name, options, *shape, rows, threads)
        as_int8 = own if matrix.scheme.name == DEFAULT else measure(DEFAULT, plain, *shape, rows, threads)
        before = found.get(graph, (0.0, 0.0))
        found[graph] = (before[0] + own[matrix.form], before[1] + as_int8[first])
    return found


@cache
def measure(
    scheme: str, options: tuple[Any, ...], width: int, outputs: int, rows: int, threads: int
) -> dict[str, float]:
    """Return microseconds of a product by form: processor time with one thread, else wall time."""
    forms = find(scheme).forms(dict(options))
    sessions = {form: _session(scheme, options, width, outputs, form, threads) for form in forms}
    x = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    clock = time.process_time if threads == 1 else time.perf_counter
    found: dict[str, list[float]] = {form: [] for form in sessions}
    for at in range(_ROUNDS + 1):  # the first one warms up
        for form, session in sessions.items():
            binding = session.io_binding()
            binding.bind_cpu_input("x", x)
            names = [out.name for out in session.get_outputs()]
            for name in names:
                binding.bind_output(name, "cpu")
            count, took, began = 0, 0.0, clock()
            while took < _MIN_ROUND_SECONDS or not count:
                session.run_with_iobinding(binding)
                count, took = count + len(names), clock() - began
            if at:
                found[form].append(1e6 * took / count)
    return {form: median(times) for form, times in found.items()}


def _session(scheme: str, options: tuple[Any, ...], width: int, outputs: int, form: str, threads: int) -> Any:
    """Return a session of products [K, N] of one input in one form, with different random codes."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants, names = [], [], []
    numbers = torch.Generator().manual_seed(0)
    for at in range(max(1, min(_MOST, _BYTES // (width * outputs)))):
        matrix = Matrix(find(scheme), outputs, width, dict(options))
        if matrix.codes.dtype == torch.int8:
            matrix.codes.data.random_(-127, 128, generator=numbers)
        matrix.choose_form(form)
        node, tensors = matrix.scheme.form_node(matrix, "x", f"y{at}")
        nodes.append(node)
        names.append(f"y{at}")
        constants += [numpy_helper.from_array(t.detach().numpy(), name) for name, t in tensors.items()]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "products",
        [value("x", TensorProto.FLOAT, ["rows", width])],
        [value(name, TensorProto.FLOAT, ["rows", outputs]) for name in names],
        constants,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )


def _facts(products: Iterable[Product]) -> dict[str, Any]:
    """Return the layers by operator, microseconds by shape, and those of each graph beside int8-dynamic.

    A shape that several schemes have is told apart by their names.
    """
    products = list(products)
    kinds = {(product.shape, product.matrix.scheme.name) for product in products}
    shapes = Counter(shape for shape, _ in kinds)
    layers: dict[str, list[str]] = {}
    us: dict[str, dict[str, Any]] = {}
    graphs: dict[str, dict[str, float]] = {}
    for product in products:
        layers.setdefault(product.matrix.form, []).extend(product.names)
        times = {form: round(took, 2) for form, took in product.us.items()}
        scheme = product.matrix.scheme.name
        told = product.shape if shapes[product.shape] == 1 else f"{product.shape}, {scheme}"
        us[told] = times | {"chosen": product.matrix.form}
        if scheme != DEFAULT:
            us[told][DEFAULT] = round(product.as_int8, 2)
        for graph, (own, as_int8) in product.by_graph.items():
            whole = graphs.setdefault(graph, {"chosen": 0.0, DEFAULT: 0.0})
            whole["chosen"] += own
            whole[DEFAULT] += as_int8
    by_graph = {graph: {n: round(t, 1) for n, t in whole.items()} for graph, whole in graphs.items()}
    return {"layers": layers, "microseconds": us, "microseconds_by_graph": by_graph}
