"""What stays float32 in the graphs of a model, decided on rows of the data, and told in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.export.graph_files import read_graph, write_graph
from smelt.export.precision.blocks import SAFE, Wide, wide_parts
from smelt.export.precision.narrow import narrow
from smelt.export.precision.ranges import Ranges, pieces, ranges_of
from smelt.runtime.images.batch import INPUT

if TYPE_CHECKING:
    from smelt.core.stage import Context
    from smelt.export.graphs.graph import Graph
    from smelt.export.parity.reference import Reference

# of texts that are looked at: rows, and tokens of the longest
ROWS, LENGTH = 32, 128
_NAMED = 5  # blocks in a warning
_PAST, _PRESENT = "past_key_values.", "present."


def rows_looked_at(parent: Any, folder: Path, ctx: Context) -> list[Reference]:
    """Return rows on which it is seen what overflows, with the tokens that a decoder is fed.

    Args:
        parent: a runner over the torch model, before anything prepares it for an export.
        folder: where its tokenizer lies.
        ctx: whose data; gets a warning where there is none.
    """
    from smelt.export.parity.reference import as_deployed
    from smelt.export.parity.rows import rows_for

    batch, real = rows_for(parent, folder, ctx.data, ctx.task, ROWS, LENGTH)
    if not real:
        ctx.warn(
            "made-up-inputs",
            "Overflow of fp16 was checked on random token ids, whose values may be smaller than those of real"
            " texts. Add data: {calibration: FILE}.",
        )
    return [as_deployed(parent, piece) for piece in pieces(batch)]


# Operators of the exported graphs without a bfloat16 kernel in ONNX Runtime's CUDA provider:
# https://github.com/microsoft/onnxruntime/blob/main/docs/OperatorKernels.md
NO_BF16_ON_CUDA = frozenset({"ReduceL2", "Clip", "Log"})


def narrow_graphs(
    graphs: Sequence[Graph],
    homes: Mapping[str, Mapping[str, str]],
    target: str,
    dtype: str,
    references: Sequence[Reference],
    ctx: Context,
) -> dict[str, set[str]]:
    """Turn the finished float32 graphs in `ctx.out` to `dtype`, in place.

    Args:
        graphs: of the model, as they were exported.
        homes: by graph the modules of its nodes (`homes_of`).
        target: of the export.
        dtype: fp16 or bf16; with fp32 nothing is done.
        references: of `rows_looked_at`, for fp16.
        ctx: gets details, and a warning of what would overflow.

    Returns:
        By graph the modules that stay float32.
    """
    if dtype == "fp32":
        return {}
    ranges = _ranges(ctx.out, graphs, references, ctx.threads) if dtype == "fp16" else {}
    chosen: dict[str, Wide] = {}
    for graph in graphs:
        path = ctx.out / f"{graph.name}.onnx"
        model = read_graph(path)
        wide = wide_parts(model, graph.module, homes[graph.name], ranges.get(graph.name))
        # caches of ONNX Runtime are numpy's, which has no bf16
        all_caches = dtype == "bf16" and target in ("ort-cuda", "ort-tensorrt", "ort-tensorrt-rtx")
        lacking = NO_BF16_ON_CUDA if dtype == "bf16" and target == "ort-cuda" else frozenset[str]()
        nodes = {*wide.nodes, *(n.output[0] for n in model.graph.node if n.op_type in lacking)}
        narrow(model, graph.name, dtype, nodes, _outside(model, wide, all_caches))
        write_graph(model, path)
        chosen[graph.name] = wide
    ctx.details["float32"] = _facts(chosen)
    if (text := warning_of(chosen)) is not None:
        ctx.warn("kept-float32", text)
    return {name: {*wide.norms, *wide.blocks} for name, wide in chosen.items()}


def _ranges(
    folder: Path, graphs: Sequence[Graph], references: Sequence[Reference], threads: int | None
) -> dict[str, Ranges]:
    found = {graph.name: ranges_of(folder, graph.name, references, threads) for graph in graphs}
    left = [(name, value) for r in found.values() for name, value in r.values.items()]
    caches = {_PAST + name[len(_PRESENT) :]: value for name, value in left if name.startswith(_PRESENT)}
    for ranges in found.values():
        ranges.values.update(caches)  # what one call leaves is what the next one reads
    return found


def _outside(model: Any, wide: Wide, all_caches: bool) -> set[str]:
    """Return the inputs and outputs of a graph that stay float32: images, what overflows, or `all_caches`."""
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    caches = {name for name in ends if name.startswith((_PAST, _PRESENT))}
    return (ends & (wide.values | {INPUT})) | (caches if all_caches else set())


def _facts(chosen: Mapping[str, Wide]) -> dict[str, Any]:
    """Return what the manifest says: by graph the blocks with their largest values, and how many norms."""
    return {
        name: {
            "blocks": {block: float(f"{value:.4g}") for block, value in wide.blocks.items()},
            "norms": len(wide.norms),
        }
        for name, wide in chosen.items()
    }


def warning_of(chosen: Mapping[str, Wide]) -> str | None:
    """Return a sentence on the blocks that would overflow in float16, or None."""
    largest: dict[str, float] = {}
    for wide in chosen.values():
        for block, value in wide.blocks.items():
            largest[block] = max(value, largest.get(block, 0.0))
    if not largest:
        return None
    worst = sorted(largest, key=lambda block: -largest[block])
    words = ", ".join(f"{block or 'the model itself'} ({largest[block]:,.0f})" for block in worst[:_NAMED])
    more = f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
    blocks = "1 block stays" if len(worst) == 1 else f"{len(worst)} blocks stay"
    return (
        f"fp16: {blocks} float32, with values or sums that float16 (at most 65,504) cannot hold with room to"
        f" spare (above {SAFE:,.0f}): {words}{more}"
    )
