"""What the onnx stage has measured, and what it writes down of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.core.stage import Context
from smelt.export.graphs.graph import Graph
from smelt.export.parity.reference import Reference, deployed_again
from smelt.export.tune.products import MARGIN, choose_forms
from smelt.export.tune.settings import Autotune
from smelt.export.tune.threads import cores, measure_threads
from smelt.runtime.layers.binary_inputs import BinaryInputs
from smelt.runtime.schemes.registry import DEFAULT


def choose_operators(
    parent: Any,
    graphs: list[Graph],
    reference: Reference,
    use: Autotune,
    threads: int,
    stay: Sequence[Any],
    ctx: Context,
) -> Reference:
    """Choose operators by measuring; return what the parent computes with them, for the parity check.

    Args:
        parent: the runner of the model that is exported.
        graphs: of it, before they are traced.
        reference: on real rows; their mean length is that of an encoder's texts.
        use: texts per call, and beams.
        threads: for ONNX Runtime.
        stay: layers that keep their first operator, whatever is faster for a whole product: the loop takes
            only some rows of a head with a shortlist, which MatMulNBits does not.
        ctx: of the stage; details and warnings are added.
    """
    if any(isinstance(module, BinaryInputs) for module in parent.backend.model.modules()):
        ctx.warn(
            "operators-fixed",
            "autotune: layers with one-bit inputs keep their operators: another operator sums in another"
            " order,"
            " and an input near its threshold would flip.",
        )
        return reference
    size = use.batch_size
    length = round(float(reference.batch.attention_mask.sum(axis=1).mean()))
    steps = graphs[-1].name if reference.tokens is not None else ""  # a step has one token of each text
    each = size * use.num_beams
    rows = {graph.name: each if graph.name == steps else size * length for graph in graphs}
    found = choose_forms(graphs, rows, threads, [m.matrix for m in stay if hasattr(m, "matrix")])
    forms = [times.keys() - {"chosen", DEFAULT} for times in found["microseconds"].values()]
    if not any(len(names) > 1 for names in forms):
        ctx.warn(
            "nothing-to-tune", "autotune: every layer of this model can be exported as one operator only."
        )
    _compare(found["microseconds_by_graph"], steps, use, ctx)
    told = {"batch_size": size, "num_beams": use.num_beams, "input_tokens": length, "threads": threads}
    ctx.details["autotune"] = told | found
    return deployed_again(parent, reference)


def _compare(by_graph: Mapping[str, Mapping[str, float]], steps: str, use: Autotune, ctx: Context) -> None:
    """Warn where the products of a graph are slower than int8-dynamic's would be.

    steps: the graph that runs once for each token; "" for none.
    """
    slower = [
        f"{took['chosen'] / took[DEFAULT]:.2f} times in {graph} ({took['chosen']:.0f} against"
        f" {took[DEFAULT]:.0f} µs)"
        for graph, took in by_graph.items()
        if took["chosen"] * (1 - MARGIN) > took[DEFAULT] > 0
    ]
    if slower:
        beams = f" and {use.num_beams} beams" if use.num_beams > 1 else ""
        once = " and ".join(graph for graph in by_graph if graph != steps)
        often = f"; for each text {steps} runs once a token, {once} once" if steps and once else ""
        ctx.warn(
            "slower-than-default",
            f"autotune: with batches of {use.batch_size}{beams} these quantized layers are slower on this"
            f" machine"
            f" than with {DEFAULT}: {', '.join(slower)}{often}. Compare with a branch of scheme: {DEFAULT}.",
        )


def write_threads(
    threads: int | str, target: str, dtype: str, reference: Reference, size: int, ctx: Context
) -> None:
    """Write into the artifact's details how many threads it takes where its user does not say.

    Args:
        threads: the number, or `autotune`.
        target: of the export.
        dtype: what the runtime computes in.
        reference: on real rows.
        size: texts per call.
        ctx: of the stage, whose folder holds the finished graphs.
    """
    if isinstance(threads, int):
        if threads > cores():
            ctx.warn(
                "more-threads-than-cores", f"threads: {threads}, but this process may use {cores()} cores."
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
            f" {count} next to autotune to choose for that.",
        )
