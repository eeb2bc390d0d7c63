"""Autotuning of the onnx stage: measure operators and thread counts on this machine, choose the fastest.

A scheme lists the operators that can compute it (`Scheme.forms`). One may be faster for one row and slower
for eight, or faster for few inputs and slower for many, and processors differ. So the operator of each
quantized layer is chosen by measurements for its shape. The same matrix multiplications are also timed in
int8-dynamic, so that a scheme that is slower than int8-dynamic for this use is reported.

An operator must not be slower than the first one at any of the batch sizes. The operators
that are fastest for one row make a call of 32 texts slower (docs/measurements/peers.md, `int8-tuned`).

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
from statistics import mean, median
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

    names: of its layers in the graphs. row_counts: rows of activations in each of its uses, by batch size.
    microseconds: of all uses at each batch size, by operator. int8_microseconds: of int8-dynamic, for all
    batch sizes together. by_graph: of the chosen operator and of int8-dynamic, by graph.
    """

    matrix: QuantizedMatrix
    names: list[str] = field(default_factory=list)
    row_counts: list[Sequence[int]] = field(default_factory=list)
    microseconds: dict[str, list[float]] = field(default_factory=dict)
    int8_microseconds: float = 0.0
    by_graph: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def variants(self) -> tuple[str, ...]:
        """The operators that can compute it."""
        return self.matrix.scheme.operator_variants(self.matrix.options)

    @property
    def shape(self) -> str:
        """K x N, and the numbers of rows."""
        rows = " and ".join(
            f"{'/'.join(map(str, counts))} row{'s' * (list(counts) != [1])}" for counts in self.row_counts
        )
        return f"{self.matrix.width} x {len(self.matrix.codes)}, {rows}"


def choose_variants(
    graphs: Iterable[GraphSpec],
    rows: Mapping[str, Sequence[int]],
    threads: int,
    fixed: Iterable[QuantizedMatrix] = (),
) -> dict[str, Any]:
    """Choose an operator for each quantized layer of `graphs`; return the details for the report.

    Args:
        graphs: before they are traced.
        rows: rows of activations in a matrix multiplication at each batch size, by the graph's name.
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


def fastest_variant(microseconds: Mapping[str, Sequence[float]]) -> str:
    """Return the fastest operator on average over the batch sizes, relative to the first one.

    It is the first one unless another is faster by more than the margin, and slower at no batch size.
    """
    first = next(iter(microseconds))
    relative = {
        form: [us / base for us, base in zip(times, microseconds[first], strict=True)]
        for form, times in microseconds.items()
    }
    best = min(
        (form for form, ratios in relative.items() if max(ratios) <= 1), key=lambda form: mean(relative[form])
    )
    return best if mean(relative[best]) < 1 - OPERATOR_MARGIN else first


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
    for name, module_layer in module.named_modules():
        if isinstance(module_layer, QuantizedLinear) and id(module_layer) not in unused:
            yield name, module_layer


def _layer_ids(layers: Iterable[nn.Module | None]) -> set[int]:
    """Return the ids of layers and of the halves of low-rank layers."""
    return {id(module) for layer in layers if layer is not None for module in layer.modules()}


def _apply_to_parts(matrix: QuantizedMatrix, parts: Iterable[nn.Module]) -> None:
    """Make torch compute the layers of a packed projection as the graph does, for the parity check."""
    for part in parts:
        if isinstance(part, QuantizedLinear) and not part.matrix.variant:
            part.matrix.select_variant(matrix.variant)


def _measure_matrix(product: MeasuredMatrix, threads: int) -> dict[str, list[float]]:
    """Return microseconds of all uses at each batch size, by operator."""
    matrix, options = product.matrix, tuple(product.matrix.options.items())
    shape = (matrix.width, len(matrix.codes))
    total = {form: [0.0] * len(product.row_counts[0]) for form in product.variants}
    for counts in product.row_counts:
        for size_index, rows in enumerate(counts):
            times = measure_variants(matrix.scheme.name, options, *shape, rows, threads)
            for form, us in times.items():
                total[form][size_index] += us
    return total


def _measure_by_graph(product: MeasuredMatrix, threads: int) -> dict[str, tuple[float, float]]:
    """Return microseconds by graph: with the chosen operator, and with the first of int8-dynamic."""
    matrix, default_form_options = product.matrix, default_options(find_scheme(DEFAULT_SCHEME))
    first, option_items = (
        find_scheme(DEFAULT_SCHEME).operator_variants(default_form_options)[0],
        tuple(default_form_options.items()),
    )
    shape, options = (matrix.width, len(matrix.codes)), tuple(matrix.options.items())
    microseconds: dict[str, tuple[float, float]] = {}
    uses = zip(product.names, product.row_counts, strict=True)
    for name, rows in ((name, rows) for name, counts in uses for rows in counts):
        graph = name.partition(": ")[0]
        layer_times = measure_variants(matrix.scheme.name, options, *shape, rows, threads)
        as_int8 = (
            layer_times
            if matrix.scheme.name == DEFAULT_SCHEME
            else measure_variants(DEFAULT_SCHEME, option_items, *shape, rows, threads)
        )
        previous = microseconds.get(graph, (0.0, 0.0))
        microseconds[graph] = (previous[0] + layer_times[matrix.variant], previous[1] + as_int8[first])
    return microseconds


@cache
def measure_variants(
    scheme: str, options: tuple[Any, ...], width: int, outputs: int, rows: int, threads: int
) -> dict[str, float]:
    """Return microseconds of a layer by operator: CPU time with one thread, else wall time."""
    forms = find_scheme(scheme).operator_variants(dict(options))
    sessions = {form: _timing_session(scheme, options, width, outputs, form, threads) for form in forms}
    x = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    clock = time.process_time if threads == 1 else time.perf_counter
    times_by_form: dict[str, list[float]] = {form: [] for form in sessions}
    for round_index in range(_OPERATOR_ROUNDS + 1):  # the first round is a warm-up
        for form, session in sessions.items():
            binding = session.io_binding()
            binding.bind_cpu_input("x", x)
            names = [out.name for out in session.get_outputs()]
            for name in names:
                binding.bind_output(name, "cpu")
            count, elapsed, start = 0, 0.0, clock()
            while elapsed < _OPERATOR_ROUND_SECONDS or not count:
                session.run_with_iobinding(binding)
                count, elapsed = count + len(names), clock() - start
            if round_index:
                times_by_form[form].append(1e6 * elapsed / count)
    return {form: median(times) for form, times in times_by_form.items()}


def _timing_session(
    scheme: str, options: tuple[Any, ...], width: int, outputs: int, form: str, threads: int
) -> Any:
    """Return a session of matrices [K, N] with one input and operator, and different random weights."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants, names = [], [], []
    generator = torch.Generator().manual_seed(0)
    for copy_index in range(max(1, min(_MAX_COPIES, _MAX_BYTES // (width * outputs)))):
        matrix = QuantizedMatrix(find_scheme(scheme), outputs, width, dict(options))
        if matrix.codes.dtype == torch.int8:
            matrix.codes.data.random_(-127, 128, generator=generator)
        matrix.select_variant(form)
        node, tensors = matrix.scheme.variant_node(matrix, "x", f"y{copy_index}")
        nodes.append(node)
        names.append(f"y{copy_index}")
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
    shape_schemes = {(product.shape, product.matrix.scheme.name) for product in products}
    shapes = Counter(shape for shape, _ in shape_schemes)
    layers: dict[str, list[str]] = {}
    us: dict[str, dict[str, Any]] = {}
    graphs: dict[str, dict[str, float]] = {}
    for product in products:
        layers.setdefault(product.matrix.variant, []).extend(product.names)
        times = {form: round(sum(durations), 2) for form, durations in product.microseconds.items()}
        scheme = product.matrix.scheme.name
        key = product.shape if shapes[product.shape] == 1 else f"{product.shape}, {scheme}"
        us[key] = times | {"chosen": product.matrix.variant}
        if scheme != DEFAULT_SCHEME:
            us[key][DEFAULT_SCHEME] = round(product.int8_microseconds, 2)
        for graph, (chosen_us, as_int8) in product.by_graph.items():
            totals = graphs.setdefault(graph, {"chosen": 0.0, DEFAULT_SCHEME: 0.0})
            totals["chosen"] += chosen_us
            totals[DEFAULT_SCHEME] += as_int8
    by_graph = {graph: {n: round(t, 1) for n, t in totals.items()} for graph, totals in graphs.items()}
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
    get_affinity = getattr(os, "sched_getaffinity", None)
    return len(get_affinity(0)) if get_affinity else os.cpu_count() or 1


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
    resized_batch = Batch(batch.input_ids[rows], batch.attention_mask[rows], types)
    with ExitStack() as stack:
        calls = {}
        for count in thread_counts(available_cores()):
            runner = stack.enter_context(open_folder(folder, "onnx", target, count, dtype=dtype))
            calls[count] = partial(_run_once, runner, resized_batch, generates)
        return fewest_threads(_time_calls(calls))


def thread_counts(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and `most`; each count needs a runner with its own weights and threads."""
    return [n for n in (2**exponent for exponent in range(most.bit_length())) if n < most] + [most]


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
    times_by_count: dict[int, list[float]] = {count: [] for count in calls}
    for round_index in range(_THREAD_ROUNDS + 1):  # the first round is a warm-up
        for count, call in calls.items():
            time.sleep(_SETTLE_SECONDS)
            times: list[float] = []
            round_start = time.perf_counter()
            while time.perf_counter() - round_start < _THREAD_ROUND_SECONDS or not times:
                start = time.perf_counter()
                call()
                times.append(1000 * (time.perf_counter() - start))
            if round_index:
                times_by_count[count].append(median(times))
    return {count: median(times) for count, times in times_by_count.items()}


def fewest_threads(times_ms: dict[int, float]) -> tuple[int, dict[str, float]]:
    """Return the fewest threads that are within the margin of the fastest, and the times for the report."""
    best = min(times_ms.values())
    count = min(n for n, duration in times_ms.items() if duration * (1 - THREADS_MARGIN) <= best)
    return count, {f"{n} thread{'s' * (n != 1)}": round(duration, 3) for n, duration in times_ms.items()}


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
        autotune: texts per call, and beams; by default one.
        threads: for ONNX Runtime.
        fixed_layers: layers that keep their first operator. With a shortlist the generation graph gathers
            rows of the output layer, which MatMulNBits does not support.
        ctx: of the stage; details and warnings are added.
    """
    sizes, beams = autotune.batch_sizes or (1,), autotune.num_beams or 1
    length = round(float(reference.batch.attention_mask.sum(axis=1).mean()))
    steps = graphs[-1].name if reference.tokens is not None else ""  # a step has one token of each text
    rows = {
        graph.name: [size * (beams if graph.name == steps else length) for size in sizes] for graph in graphs
    }
    choices = choose_variants(graphs, rows, threads, [m.matrix for m in fixed_layers if hasattr(m, "matrix")])
    forms = [times.keys() - {"chosen", DEFAULT_SCHEME} for times in choices["microseconds"].values()]
    if not any(len(names) > 1 for names in forms):
        ctx.warn(
            "nothing-to-tune",
            "autotune: each layer of this model has only one possible operator. Remove autotune.",
        )
    _warn_if_slower(choices["microseconds_by_graph"], steps, sizes, beams, ctx)
    details = {
        "batch_sizes": list(sizes),
        "num_beams": beams,
        "input_tokens": length,
        "threads": threads,
    }
    ctx.details["autotune"] = details | choices
    return rerun_reference(parent, reference)


def _warn_if_slower(
    by_graph: Mapping[str, Mapping[str, float]],
    steps: str,
    batch_sizes: Sequence[int],
    num_beams: int,
    ctx: Context,
) -> None:
    """Warn if the quantized layers of a graph are slower than they would be with int8-dynamic.

    steps: the graph that runs once per token; "" if there is none.
    """
    slower = [
        f"{durations['chosen'] / durations[DEFAULT_SCHEME]:.2f} times in {graph} "
        f"({durations['chosen']:.0f} vs."
        f" {durations[DEFAULT_SCHEME]:.0f} µs)"
        for graph, durations in by_graph.items()
        if durations["chosen"] * (1 - OPERATOR_MARGIN) > durations[DEFAULT_SCHEME] > 0
    ]
    if slower:
        beams = f" and {num_beams} beams" if num_beams > 1 else ""
        other_graphs = " and ".join(graph for graph in by_graph if graph != steps)
        frequency_note = (
            f". For each text {steps} runs once per token, {other_graphs} once"
            if steps and other_graphs
            else ""
        )
        ctx.warn(
            "slower-than-default",
            f"autotune: with batches of {', '.join(map(str, batch_sizes))}{beams} these quantized layers are"
            f" slower on this machine than with {DEFAULT_SCHEME}: {', '.join(slower)}{frequency_note}."
            f" Compare with a branch that uses scheme: {DEFAULT_SCHEME}.",
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
