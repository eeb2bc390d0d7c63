"""Convert the graphs of a model to half precision, and choose the nodes that remain float32.

Select the nodes of a half-precision graph that remain float32, and their blocks.

Norms remain float32 in both. In float16 so do nodes whose outputs, inputs or sums come close to its range: an
FFN's last layer and the residual stream after it, attention with very large scores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from smelt.export.graph_files import read_graph, write_graph
from smelt.export.precision.convert_to_half import convert_to_half
from smelt.export.precision.value_ranges import ValueRanges, measure_ranges, split_batch
from smelt.runtimes.images import PIXEL_VALUES

if TYPE_CHECKING:
    from smelt.core.stage import Context
    from smelt.export.graphs.graph_spec import GraphSpec
    from smelt.export.parity.torch_reference import TorchReference


FP16_MAX = 65504.0
# half of it: other samples have larger values than the calibration samples, and masks are 20,000
FP16_SAFE_MAX = FP16_MAX / 2
_NORM_OPS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"


@dataclass
class Fp32Selection:
    """The parts of a graph that remain float32.

    nodes: by the name of their first output. blocks: names of modules with the largest value of their
    outputs, inputs or sums. norms: names of modules. values: those that are too large.
    """

    nodes: set[str] = field(default_factory=set)
    blocks: dict[str, float] = field(default_factory=dict)
    norms: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)


def module_of_nodes(model: Any, module: nn.Module) -> dict[str, str]:
    """Return the innermost module of `module` that each node of an onnx.ModelProto was exported from.

    It is found by the names of the node and of its outputs: simplifying preserves only these.
    """
    homes: dict[str, str] = {}
    for node in model.graph.node:
        scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES_KEY), "[]")
        home = ""
        for scope in re.findall(r"'([^']*)'", scopes):
            name = ".".join(part for part in scope.split(".") if not part.startswith("slice("))
            # calls of a replaced forward are named after the caller
            inside = (place for place in (name, f"{home}.{name}") if name)
            home = next((place for place in inside if _submodule(module, place) is not None), home)
        if home:
            homes.update(dict.fromkeys((node.name, *node.output), home))
    return homes


def select_fp32(
    model: Any, module: nn.Module, homes: Mapping[str, str], ranges: ValueRanges | None
) -> Fp32Selection:
    """Return the parts of the float32 graph `model` that remain float32.

    Args:
        model: an onnx.ModelProto.
        module: the exported module.
        homes: the module of each node, by `module_of_nodes`.
        ranges: of its values; None if the other precision has the range of float32.
    """
    wide = Fp32Selection()
    values = {} if ranges is None else ranges.values
    wide.values = {name for name, value in values.items() if not value <= FP16_SAFE_MAX}
    sums = {} if ranges is None else {name: v for name, v in ranges.sums.items() if not v <= FP16_MAX}
    above: dict[str, str] = {}
    for node in model.graph.node:
        block = homes.get(node.name) or homes.get(node.output[0]) or ""
        if node.op_type in _NORM_OPS or is_norm_module(module, block):
            wide.nodes.add(node.output[0])
            wide.norms.add(block)
        # an optimizer's own nodes are assigned to the module of their inputs
        block = block or next((above[name] for name in node.input if name in above), "")
        above.update(dict.fromkeys(node.output, block))
        given = [name for name in (*node.input, *node.output) if name in wide.values]
        largest = [values[name] for name in given] + [sums[n] for n in node.output if n in sums]
        if largest and node.output[0] not in wide.nodes:
            wide.nodes.add(node.output[0])
            wide.blocks[block] = max(*largest, wide.blocks.get(block, 0.0))
    return wide


def is_norm_module(module: nn.Module, block: str) -> bool:
    """Return whether the block is a norm: its weight is a vector."""
    weight = getattr(_submodule(module, block), "weight", None) if block else None
    return isinstance(weight, Tensor) and weight.dim() == 1


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


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
