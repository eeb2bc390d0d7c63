"""Run the autotuning of the onnx stage and record its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.core.stage import Context
from smelt.export.autotune.choose_operators import OPERATOR_MARGIN, choose_variants
from smelt.export.autotune.choose_threads import available_cores, measure_threads
from smelt.export.autotune.settings import AutotuneSettings
from smelt.export.graphs.graph_spec import GraphSpec
from smelt.export.parity.torch_reference import TorchReference, rerun_reference
from smelt.runtime.layers.binary_input_linear import BinaryInputs
from smelt.runtime.schemes.registry import DEFAULT_SCHEME


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
    if any(isinstance(module, BinaryInputs) for module in parent.backend.model.modules()):
        ctx.warn(
            "operators-fixed",
            "autotune: layers with one-bit inputs keep their operators, because a different summation order"
            " could flip inputs near the threshold.",
        )
        return reference
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
    told = {"batch_size": size, "num_beams": autotune.num_beams, "input_tokens": length, "threads": threads}
    ctx.details["autotune"] = told | found
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
