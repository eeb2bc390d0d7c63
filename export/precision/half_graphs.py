"""Convert the graphs of a model to half precision, and choose the nodes that remain float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.export.graph_files import read_graph, write_graph
from smelt.export.precision.convert_to_half import convert_to_half
from smelt.export.precision.select_fp32 import FP16_SAFE_MAX, Fp32Selection, select_fp32
from smelt.export.precision.value_ranges import ValueRanges, measure_ranges, split_batch
from smelt.runtime.images.image_batch import PIXEL_VALUES

if TYPE_CHECKING:
    from smelt.core.stage import Context
    from smelt.export.graphs.graph_spec import GraphSpec
    from smelt.export.parity.torch_reference import TorchReference

# of the texts that ranges are measured on: rows, and tokens of the longest
OVERFLOW_ROWS, OVERFLOW_LENGTH = 32, 128
_MAX_NAMED = 5  # blocks in a warning
_PAST, _PRESENT = "past_key_values.", "present."


def overflow_samples(parent: Any, folder: Path, ctx: Context) -> list[TorchReference]:
    """Return samples for measuring overflow, with the tokens of a decoder.

    Args:
        parent: a runner of the torch model, before it is prepared for an export.
        folder: of its tokenizer.
        ctx: with the data; gets a warning if there are none.
    """
    from smelt.export.parity.parity_samples import parity_samples
    from smelt.export.parity.torch_reference import run_as_deployed

    batch, real = parity_samples(parent, folder, ctx.data, ctx.task, OVERFLOW_ROWS, OVERFLOW_LENGTH)
    if not real:
        ctx.warn(
            "made-up-inputs",
            "fp16 overflow was checked on random token ids, where activations may be smaller than on real"
            " texts. Add data: {calibration: FILE}.",
        )
    return [run_as_deployed(parent, piece) for piece in split_batch(batch)]


# Operators of the exported graphs without a bfloat16 kernel in ONNX Runtime's CUDA provider:
# https://github.com/microsoft/onnxruntime/blob/main/docs/OperatorKernels.md
NO_BF16_ON_CUDA = frozenset({"ReduceL2", "Clip", "Log"})


def convert_graphs_to_half(
    graphs: Sequence[GraphSpec],
    homes: Mapping[str, Mapping[str, str]],
    target: str,
    dtype: str,
    references: Sequence[TorchReference],
    ctx: Context,
) -> dict[str, set[str]]:
    """Convert the finished float32 graphs in `ctx.out` to `dtype`, in place.

    Args:
        graphs: of the model, as they were exported.
        homes: by graph the modules of its nodes (`module_of_nodes`).
        target: of the export.
        dtype: fp16 or bf16; with fp32 nothing is done.
        references: of `overflow_samples`, for fp16.
        ctx: gets details, and a warning about overflow.

    Returns:
        By graph the modules that remain float32.
    """
    if dtype == "fp32":
        return {}
    ranges = _collect_ranges(ctx.out, graphs, references, ctx.threads) if dtype == "fp16" else {}
    chosen: dict[str, Fp32Selection] = {}
    for graph in graphs:
        path = ctx.out / f"{graph.name}.onnx"
        model = read_graph(path)
        wide = select_fp32(model, graph.module, homes[graph.name], ranges.get(graph.name))
        # ONNX Runtime's caches are numpy arrays, which have no bf16
        all_caches = dtype == "bf16" and target in ("ort-cuda", "ort-tensorrt", "ort-tensorrt-rtx")
        lacking = NO_BF16_ON_CUDA if dtype == "bf16" and target == "ort-cuda" else frozenset[str]()
        nodes = {*wide.nodes, *(n.output[0] for n in model.graph.node if n.op_type in lacking)}
        convert_to_half(model, graph.name, dtype, nodes, _fp32_inputs_outputs(model, wide, all_caches))
        write_graph(model, path)
        chosen[graph.name] = wide
    ctx.details["float32"] = _manifest_details(chosen)
    if (text := overflow_warning(chosen)) is not None:
        ctx.warn("kept-float32", text)
    return {name: {*wide.norms, *wide.blocks} for name, wide in chosen.items()}


def _collect_ranges(
    folder: Path, graphs: Sequence[GraphSpec], references: Sequence[TorchReference], threads: int | None
) -> dict[str, ValueRanges]:
    found = {graph.name: measure_ranges(folder, graph.name, references, threads) for graph in graphs}
    left = [(name, value) for r in found.values() for name, value in r.values.items()]
    caches = {_PAST + name[len(_PRESENT) :]: value for name, value in left if name.startswith(_PRESENT)}
    for ranges in found.values():
        ranges.values.update(caches)  # the output caches of one call are the inputs of the next
    return found


def _fp32_inputs_outputs(model: Any, wide: Fp32Selection, all_caches: bool) -> set[str]:
    """Return the inputs and outputs of a graph that remain float32: images, overflows, or `all_caches`."""
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    caches = {name for name in ends if name.startswith((_PAST, _PRESENT))}
    return (ends & (wide.values | {PIXEL_VALUES})) | (caches if all_caches else set())


def _manifest_details(chosen: Mapping[str, Fp32Selection]) -> dict[str, Any]:
    """Return the manifest's details: by graph the blocks with their maxima, and the number of norms."""
    return {
        name: {
            "blocks": {block: float(f"{value:.4g}") for block, value in wide.blocks.items()},
            "norms": len(wide.norms),
        }
        for name, wide in chosen.items()
    }


def overflow_warning(chosen: Mapping[str, Fp32Selection]) -> str | None:
    """Return a sentence about the blocks that would overflow in float16, or None."""
    largest: dict[str, float] = {}
    for wide in chosen.values():
        for block, value in wide.blocks.items():
            largest[block] = max(value, largest.get(block, 0.0))
    if not largest:
        return None
    worst = sorted(largest, key=lambda block: -largest[block])
    words = ", ".join(f"{block or 'the whole model'} ({largest[block]:,.0f})" for block in worst[:_MAX_NAMED])
    more = f" and {len(worst) - _MAX_NAMED} more" if len(worst) > _MAX_NAMED else ""
    blocks = "1 block remains" if len(worst) == 1 else f"{len(worst)} blocks remain"
    return (
        f"fp16: {blocks} float32, because values or sums are close to or above float16's maximum (65,504;"
        f" limit {FP16_SAFE_MAX:,.0f}): {words}{more}."
    )
