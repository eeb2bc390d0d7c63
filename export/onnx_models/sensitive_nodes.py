"""`exclude: auto`: the nodes that are kept float, the most sensitive ones first.

The sensitivity of a node is the error of the outputs when it alone is quantized, as `quantize` measures that
of a layer. As few nodes are excluded as the limit of the difference needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from smelt.core.messages import with_count
from smelt.data.npz_arrays import SampleAxes
from smelt.export.onnx_models.graph_quantizer import GraphQuantizer
from smelt.export.onnx_models.output_comparison import OutputComparison, compare_graphs, measure_noise
from smelt.export.onnx_models.settings import AUTO
from smelt.stage import Context

_MAX_NAMED = 5  # nodes in a warning


def nodes_to_exclude(
    quantizer: GraphQuantizer, feeds: list[Any], axes: SampleAxes, ctx: Context
) -> tuple[str, ...]:
    """Return `exclude` of the stage with the nodes that `auto` stands for.

    Args:
        quantizer: of the graph.
        feeds: samples, call by call.
        axes: the sample axis of an input, if it is not the first.
        ctx: reports progress; gets details and a warning about the excluded nodes.

    Raises:
        RunError: ONNX Runtime cannot run the quantized graph.
    """
    from smelt.export.onnx_models.graph_samples import batch_size_of, require_runnable

    settings = quantizer.settings
    named = tuple(name for name in settings.exclude if name != AUTO)
    silent = replace(ctx, warnings=[], details={})  # warnings are those of the result

    def compare(exclude: Collection[str], samples: list[Any]) -> OutputComparison:
        comparison = OutputComparison(axes)
        with TemporaryDirectory(dir=ctx.out.parent, prefix=".trial-") as folder:
            trial = Path(folder, quantizer.path.name)
            quantizer.write(trial, [*named, *exclude], silent)
            if not exclude:
                require_runnable(trial, samples)
            compare_graphs(comparison, trial, quantizer.path, samples, ctx.threads)
        return comparison

    def exceeding(comparison: OutputComparison) -> set[str]:
        judge_classes = settings.max_difference is None
        return {name for name, _ in comparison.exceeding(settings.difference_limit, judge_classes)}

    different = exceeding(compare((), feeds))
    noise = OutputComparison(axes)
    if different:
        measure_noise(noise, quantizer.path, feeds, ctx.threads)
    random = exceeding(noise)  # of the float graph in each call
    if different <= random:
        return named
    nodes, fused = quantizer.quantizable_nodes(), quantizer.fused_nodes()
    batch_size = batch_size_of(feeds[0], axes)
    few = feeds[: max(1, settings.sensitivity_samples // batch_size)]
    sensitivities = {}
    for count, name in enumerate(nodes, start=1):
        others = [*(node for node in nodes if node != name), *fused]
        outputs = compare(others, few).outputs
        sensitivities[name] = max(outputs[key].relative_rmse for key in outputs.keys() - random)
        ctx.progress(count, len(nodes), "sensitivity of each node")
    ranked = sorted(nodes, key=lambda name: -sensitivities[name])[: settings.max_excluded]
    excluded = ranked[: _fewest(ranked, lambda exclude: exceeding(compare(exclude, feeds)) <= random)]
    _record(excluded, {name: sensitivities[name] for name in ranked}, len(few) * batch_size, quantizer, ctx)
    return *named, *excluded


def _fewest(ranked: list[str], is_close: Callable[[list[str]], bool]) -> int:
    """Return how many of `ranked` must be excluded, the first ones first; all if that is too few."""
    low, high = 1, len(ranked)
    while low < high:
        middle = (low + high) // 2
        if is_close(ranked[:middle]):
            high = middle
        else:
            low = middle + 1
    return high


def _record(
    excluded: list[str],
    sensitivities: dict[str, float],
    samples: int,
    quantizer: GraphQuantizer,
    ctx: Context,
) -> None:
    """Write the excluded nodes and the sensitivities into the details, and warn about the former."""
    rounded = {name: float(f"{value:.3g}") for name, value in sensitivities.items()}
    ctx.details["sensitivity"] = ctx.details.get("sensitivity", {}) | rounded
    ctx.details["sensitivity_samples"] = samples
    ctx.details["excluded"] = [*ctx.details.get("excluded", []), *excluded]
    texts = ", ".join(f"{name} ({rounded[name]:g})" for name in excluded[:_MAX_NAMED])
    more = f" and {len(excluded) - _MAX_NAMED:,} more" if len(excluded) > _MAX_NAMED else ""
    ctx.warn(
        "nodes-excluded",
        f"{quantizer.path.name}: exclude: auto keeps {with_count(len(excluded), 'node')} float, the most"
        f" sensitive first: {texts}{more}.",
        setting="exclude",
    )
