"""Autotuning of the onnx stage: measure operators and thread counts on this machine, choose the fastest.

A scheme lists the operators that can compute it (`Scheme.forms`). One may be faster for one row and slower
for eight, or faster for few inputs and slower for many, and processors differ. So the operator of each
quantized layer is chosen by measurements for its shape. The same matrix multiplications are also timed in
int8-dynamic, so that a scheme that is slower than int8-dynamic for this use is reported.

The default thread count of an artifact is the fewest threads that are as fast as any. Decoding token by token
has too little work for two threads; encoders of long texts gain. So each thread count is measured on the
artifact's own graphs, with real samples.

Shapes: K = inputs, N = outputs.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from smelt.export.graphs.attention import GraphSpec, PackedLinear, pack_projections
from smelt.export.parity.references import TorchReference, rerun_reference
from smelt.export.settings import AutotuneSettings
from smelt.generation.backend import Batch
from smelt.quantization.layers import QuantizedLinear, QuantizedMatrix
from smelt.quantization.schemes.registry import DEFAULT_SCHEME, default_options, find_scheme
from smelt.stage import Context

# Another operator than the first is chosen only if it is faster by more than this fraction
OPERATOR_MARGIN = 0.05
_OPERATOR_ROUNDS = 9
_OPERATOR_ROUND_SECONDS = 0.01
# Matrices of one shape with different weights run in turns, so that weights are not in the nearest cache
_MAX_BYTES = 4_000_000
_MAX_COPIES = 32


@dataclass
class MeasuredMatrix:
    """One matrix of a matrix multiplication, and its measurements.

    names: of its layers in the graphs. row_counts: rows of activations in each of its uses. microseconds: of
    all uses, by operator. int8_microseconds: the same of int8-dynamic. by_graph: of the chosen operator and
    of int8-dynamic, by graph.
    """

    matrix: QuantizedMatrix
    names: list[str] = field(default_factory=list)
    row_counts: list[int] = field(default_factory=list)
    microseconds: dict[str, float] = field(default_factory=dict)
    int8_microseconds: float = 0.0
    by_graph: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def variants(self) -> tuple[str, ...]:
        """The operators that can compute it."""
        return self.matrix.scheme.operator_variants(self.matrix.options)

    @property
    def shape(self) -> str:
        """K x N, and the numbers of rows."""
        rows = " and ".join(f"{n} row{'s' * (n != 1)}" for n in self.row_counts)
        return f"{self.matrix.width} x {len(self.matrix.codes)}, {rows}"


def choose_variants(
    graphs: Iterable[GraphSpec], rows: Mapping[str, int], threads: int, fixed: Iterable[QuantizedMatrix] = ()
) -> dict[str, Any]:
    """Choose an operator for each quantized layer of `graphs`; return the details for the report.

    Args:
        graphs: before they are traced.
        rows: rows of activations in a matrix multiplication of each graph, by the graph's name.
        threads: for ONNX Runtime.
        fixed: matrices that keep their first operator.
    """
    graphs = list(graphs)
    products: dict[int, MeasuredMatrix] = {}
    settled = {id(matrix) for matrix in fixed}
    for graph in graphs:
        pack_projections(graph.module.attentions)
        for name, linear in quantized_layers(graph.module):
            if (
                linear.matrix.scheme.operator_variants(linear.matrix.options)
                and id(linear.matrix) not in settled
            ):
                product = products.setdefault(id(linear.matrix), MeasuredMatrix(linear.matrix))
                product.names.append(f"{graph.name}: {name}")
                product.row_counts.append(rows[graph.name])
    for product in products.values():
        product.microseconds = _measure_matrix(product, threads)
        product.matrix.select_variant(fastest_variant(product.microseconds))
        product.by_graph = _measure_by_graph(product, threads)
        product.int8_microseconds = sum(as_int8 for _, as_int8 in product.by_graph.values())
    for graph in graphs:
        for pack in graph.module.modules():
            if isinstance(pack, PackedLinear) and isinstance(pack.packed, QuantizedLinear):
                _apply_to_parts(pack.packed.matrix, pack.firsts)
    return _report_details(products.values())


def fastest_variant(microseconds: Mapping[str, float]) -> str:
    """Return the fastest operator; the first one unless another is faster by more than the margin."""
    first, best = next(iter(microseconds)), min(microseconds, key=lambda form: microseconds[form])
    return best if microseconds[best] < (1 - OPERATOR_MARGIN) * microseconds[first] else first


def quantized_layers(module: Any) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the quantized layers that a graph multiplies with, each once, by name.

    Layers that are replaced by a packed projection are left out, and, in a graph whose inputs are the keys
    and values of cross-attention, also the layers that compute these.
    """
    unused: set[int] = set()
    for attention in module.attentions:
        parts = attention.parts
        if parts.cross:
            unused |= _layer_ids(
                [
                    attention.projection(parts.key),
                    attention.projection(parts.value),
                    attention.module.pack.packed,
                ]
            )
    packs = [m for m in module.modules() if isinstance(m, PackedLinear) and m.packed is not None]
    crossed = _layer_ids(
        attention.projection(attention.parts.query)
        for attention in module.attentions
        if attention.parts.cross
    )
    unused |= {id(first) for pack in packs for first in pack.firsts} - crossed
    for name, found in module.named_modules():
        if isinstance(found, QuantizedLinear) and id(found) not in unused:
            yield name, found


def _layer_ids(layers: Iterable[nn.Module | None]) -> set[int]:
    """Return the ids of layers and of the halves of low-rank layers."""
    return {id(module) for layer in layers if layer is not None for module in layer.modules()}


def _apply_to_parts(matrix: QuantizedMatrix, parts: Iterable[nn.Module]) -> None:
    """Make torch compute the layers of a packed projection as the graph does, for the parity check."""
    for part in parts:
        if isinstance(part, QuantizedLinear) and not part.matrix.variant:
            part.matrix.select_variant(matrix.variant)


def _measure_matrix(product: MeasuredMatrix, threads: int) -> dict[str, float]:
    matrix, total = product.matrix, dict.fromkeys(product.variants, 0.0)
    for rows in product.row_counts:
        options = tuple(matrix.options.items())
        found = measure_variants(matrix.scheme.name, options, matrix.width, len(matrix.codes), rows, threads)
        for form, us in found.items():
            total[form] += us
    return total


def _measure_by_graph(product: MeasuredMatrix, threads: int) -> dict[str, tuple[float, float]]:
    """Return microseconds by graph: with the chosen operator, and with the first of int8-dynamic."""
    matrix, usual = product.matrix, default_options(find_scheme(DEFAULT_SCHEME))
    first, plain = find_scheme(DEFAULT_SCHEME).operator_variants(usual)[0], tuple(usual.items())
    shape, options = (matrix.width, len(matrix.codes)), tuple(matrix.options.items())
    found: dict[str, tuple[float, float]] = {}
    for name, rows in zip(product.names, product.row_counts, strict=True):
        graph = name.partition(": ")[0]
        own = measure_variants(matrix.scheme.name, options, *shape, rows, threads)
        as_int8 = (
            own
            if matrix.scheme.name == DEFAULT_SCHEME
            else measure_variants(DEFAULT_SCHEME, plain, *shape, rows, threads)
        )
        before = found.get(graph, (0.0, 0.0))
        found[graph] = (before[0] + own[matrix.variant], before[1] + as_int8[first])
    return found


@cache
def measure_variants(
    scheme: str, options: tuple[Any, ...], width: int, outputs: int, rows: int, threads: int
) -> dict[str, float]:
    """Return microseconds of a layer by operator: CPU time with one thread, else wall time."""
    forms = find_scheme(scheme).operator_variants(dict(options))
    sessions = {form: _timing_session(scheme, options, width, outputs, form, threads) for form in forms}
    x = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    clock = time.process_time if threads == 1 else time.perf_counter
    found: dict[str, list[float]] = {form: [] for form in sessions}
    for at in range(_OPERATOR_ROUNDS + 1):  # the first round is a warm-up
        for form, session in sessions.items():
            binding = session.io_binding()
            binding.bind_cpu_input("x", x)
            names = [out.name for out in session.get_outputs()]
            for name in names:
                binding.bind_output(name, "cpu")
            count, took, began = 0, 0.0, clock()
            while took < _OPERATOR_ROUND_SECONDS or not count:
                session.run_with_iobinding(binding)
                count, took = count + len(names), clock() - began
            if at:
                found[form].append(1e6 * took / count)
    return {form: median(times) for form, times in found.items()}


def _timing_session(
    scheme: str, options: tuple[Any, ...], width: int, outputs: int, form: str, threads: int
) -> Any:
    """Return a session of matrices [K, N] with one input and operator, and different random weights."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants, names = [], [], []
    numbers = torch.Generator().manual_seed(0)
    for at in range(max(1, min(_MAX_COPIES, _MAX_BYTES // (width * outputs)))):
        matrix = QuantizedMatrix(find_scheme(scheme), outputs, width, dict(options))
        if matrix.codes.dtype == torch.int8:
            matrix.codes.data.random_(-127, 128, generator=numbers)
        matrix.select_variant(form)
        node, tensors = matrix.scheme.variant_node(matrix, "x", f"y{at}")
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


def _report_details(products: Iterable[MeasuredMatrix]) -> dict[str, Any]:
    """Return the layers by operator, and microseconds by shape and by graph, with those of int8-dynamic.

    A shape that several schemes have is listed once per scheme.
    """
    products = list(products)
    kinds = {(product.shape, product.matrix.scheme.name) for product in products}
    shapes = Counter(shape for shape, _ in kinds)
    layers: dict[str, list[str]] = {}
    us: dict[str, dict[str, Any]] = {}
    graphs: dict[str, dict[str, float]] = {}
    for product in products:
        layers.setdefault(product.matrix.variant, []).extend(product.names)
        times = {form: round(took, 2) for form, took in product.microseconds.items()}
        scheme = product.matrix.scheme.name
        key = product.shape if shapes[product.shape] == 1 else f"{product.shape}, {scheme}"
        us[key] = times | {"chosen": product.matrix.variant}
        if scheme != DEFAULT_SCHEME:
            us[key][DEFAULT_SCHEME] = round(product.int8_microseconds, 2)
        for graph, (own, as_int8) in product.by_graph.items():
            whole = graphs.setdefault(graph, {"chosen": 0.0, DEFAULT_SCHEME: 0.0})
            whole["chosen"] += own
            whole[DEFAULT_SCHEME] += as_int8
    by_graph = {graph: {n: round(t, 1) for n, t in whole.items()} for graph, whole in graphs.items()}
    return {"layers": layers, "microseconds": us, "microseconds_by_graph": by_graph}


# Another thread count is chosen only if it is faster by more than this fraction
THREADS_MARGIN = 0.05
_THREAD_ROUNDS = 7
_THREAD_ROUND_SECONDS = 0.02
_NEW_TOKENS = 16
# threads of the previous session may spin for some milliseconds
_SETTLE_SECONDS = 0.02


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    found = getattr(os, "sched_getaffinity", None)
    return len(found(0)) if found else os.cpu_count() or 1


def measure_threads(
    folder: Path, target: str, dtype: str, batch: Batch, size: int, generates: bool
) -> tuple[int, dict[str, float]]:
    """Time calls of `size` texts with 1, 2, 4 ... N threads in turns; return the choice and ms by count.

    Args:
        folder: of the finished graphs, with the model's config files.
        target: of the export.
        dtype: compute precision of the runtime.
        batch: real texts.
        size: texts per call.
        generates: whether a call is a generation, of at most `_NEW_TOKENS` tokens.
    """
    from smelt.runtimes.registry import open_folder

    rows = np.resize(np.arange(len(batch.input_ids)), size)
    types = None if batch.token_type_ids is None else batch.token_type_ids[rows]
    used = Batch(batch.input_ids[rows], batch.attention_mask[rows], types)
    with ExitStack() as stack:
        calls = {}
        for count in thread_counts(available_cores()):
            runner = stack.enter_context(open_folder(folder, "onnx", target, count, dtype=dtype))
            calls[count] = partial(_run_once, runner, used, generates)
        return fewest_threads(_time_calls(calls))


def thread_counts(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and `most`; each count needs a runner with its own weights and threads."""
    return [n for n in (2**at for at in range(most.bit_length())) if n < most] + [most]


def _run_once(runner: Any, batch: Batch, generates: bool) -> None:
    from smelt.generation.config import GenerationSettings, resolve_generation

    if generates:
        runner.generator(
            runner, batch, resolve_generation(GenerationSettings(max_new_tokens=_NEW_TOKENS), runner)
        )
    else:
        runner.forward(batch)


def _time_calls(calls: Mapping[int, Callable[[], None]]) -> dict[int, float]:
    """Return the median ms of a call by thread count, measured in rounds over all counts."""
    found: dict[int, list[float]] = {count: [] for count in calls}
    for at in range(_THREAD_ROUNDS + 1):  # the first round is a warm-up
        for count, call in calls.items():
            time.sleep(_SETTLE_SECONDS)
            times: list[float] = []
            began = time.perf_counter()
            while time.perf_counter() - began < _THREAD_ROUND_SECONDS or not times:
                start = time.perf_counter()
                call()
                times.append(1000 * (time.perf_counter() - start))
            if at:
                found[count].append(median(times))
    return {count: median(times) for count, times in found.items()}


def fewest_threads(times_ms: dict[int, float]) -> tuple[int, dict[str, float]]:
    """Return the fewest threads that are within the margin of the fastest, and the times for the report."""
    best = min(times_ms.values())
    count = min(n for n, took in times_ms.items() if took * (1 - THREADS_MARGIN) <= best)
    return count, {f"{n} thread{'s' * (n != 1)}": round(took, 3) for n, took in times_ms.items()}


def choose_layer_operators(
    parent: Any,
    graphs: list[GraphSpec],
    reference: TorchReference,
    autotune: AutotuneSettings,
    threads: int,
    fixed_layers: Sequence[Any],
    ctx: Context,
) -> TorchReference:
    """Choose operators by measuring; return the parent's outputs with them, for the parity check.

    Args:
        parent: the runner of the model that is exported.
        graphs: of it, before they are traced.
        reference: on real samples; their mean length is used for an encoder's texts.
        autotune: texts per call, and beams.
        threads: for ONNX Runtime.
        fixed_layers: layers that keep their first operator. With a shortlist the generation graph gathers
            rows of the output layer, which MatMulNBits does not support.
        ctx: of the stage; details and warnings are added.
    """
    size = autotune.batch_size
    length = round(float(reference.batch.attention_mask.sum(axis=1).mean()))
    steps = graphs[-1].name if reference.tokens is not None else ""  # a step has one token of each text
    each = size * autotune.num_beams
    rows = {graph.name: each if graph.name == steps else size * length for graph in graphs}
    found = choose_variants(graphs, rows, threads, [m.matrix for m in fixed_layers if hasattr(m, "matrix")])
    forms = [times.keys() - {"chosen", DEFAULT_SCHEME} for times in found["microseconds"].values()]
    if not any(len(names) > 1 for names in forms):
        ctx.warn(
            "nothing-to-tune",
            "autotune: each layer of this model has only one possible operator. Remove autotune.",
        )
    _warn_if_slower(found["microseconds_by_graph"], steps, autotune, ctx)
    details = {
        "batch_size": size,
        "num_beams": autotune.num_beams,
        "input_tokens": length,
        "threads": threads,
    }
    ctx.details["autotune"] = details | found
    return rerun_reference(parent, reference)


def _warn_if_slower(
    by_graph: Mapping[str, Mapping[str, float]], steps: str, autotune: AutotuneSettings, ctx: Context
) -> None:
    """Warn if the quantized layers of a graph are slower than they would be with int8-dynamic.

    steps: the graph that runs once per token; "" if there is none.
    """
    slower = [
        f"{took['chosen'] / took[DEFAULT_SCHEME]:.2f} times in {graph} ({took['chosen']:.0f} vs."
        f" {took[DEFAULT_SCHEME]:.0f} µs)"
        for graph, took in by_graph.items()
        if took["chosen"] * (1 - OPERATOR_MARGIN) > took[DEFAULT_SCHEME] > 0
    ]
    if slower:
        beams = f" and {autotune.num_beams} beams" if autotune.num_beams > 1 else ""
        once = " and ".join(graph for graph in by_graph if graph != steps)
        often = f". For each text {steps} runs once per token, {once} once" if steps and once else ""
        ctx.warn(
            "slower-than-default",
            f"autotune: with batches of {autotune.batch_size}{beams} these quantized layers are slower on"
            f" this machine than with {DEFAULT_SCHEME}: {', '.join(slower)}{often}. Compare with a branch"
            f" that uses scheme: {DEFAULT_SCHEME}.",
        )


def record_threads(
    threads: int | str, target: str, dtype: str, reference: TorchReference, size: int, ctx: Context
) -> None:
    """Write the artifact's default thread count into its details.

    Args:
        threads: the number, or `autotune`.
        target: of the export.
        dtype: compute precision of the runtime.
        reference: on real samples.
        size: texts per call.
        ctx: of the stage, whose folder holds the finished graphs.
    """
    if isinstance(threads, int):
        if threads > available_cores():
            ctx.warn(
                "more-threads-than-cores",
                f"threads is {threads}, but this process may use only {available_cores()} cores. Lower"
                " threads.",
            )
        ctx.details["threads"] = threads
        return
    generates = reference.tokens is not None
    count, times = measure_threads(ctx.out, target, dtype, reference.batch, size, generates)
    ctx.details.update(threads=count, threads_ms=times)
    chosen_for = ctx.details.get("autotune", {}).get("threads", count)
    if chosen_for != count:
        ctx.warn(
            "tuned-for-other-threads",
            f"Operators were chosen with {chosen_for} thread, but the artifact uses {count}. Set threads:"
            f" {count} together with autotune to choose operators for it.",
        )
