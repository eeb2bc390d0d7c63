"""Return the sizes for engines of third-party graphs: ranges by axis, independent of axis names.

For inputs of texts axis 0 is the batch and axis 1 the length. For arrays one axis is the batch; every other
axis without a fixed size gets the size of the samples in the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.data import CUSTOM_TASK
from smelt.core.errors import InputError, RunError
from smelt.core.stage import Context
from smelt.export.tensorrt.optimization_profile import ProfileShapes, SizeRange
from smelt.export.tensorrt.profile_ranges import DimensionRanges, largest_profile, profile_ranges
from smelt.export.tensorrt.settings import TensorrtSettings

_SPLIT_ORDER = ("calibration", "validation", "train")


def third_party_ranges(
    folder: Path, settings: TensorrtSettings, ctx: Context
) -> tuple[list[DimensionRanges], int | None]:
    """Return for each profile the range of the batch, and of each further axis of each input by `NAME.AXIS`.

    Raises:
        InputError: an axis has no fixed size, and there are no samples that a stage may use.
    """
    if ctx.task != CUSTOM_TASK:
        return profile_ranges(folder, settings, ctx)
    from smelt.runtime.third_party.signature import read_signature

    rows = next((ctx.data[place].arrays for place in _SPLIT_ORDER if place in ctx.data), None)
    sizes: DimensionRanges = {}
    batches: list[str] = []
    for value in read_signature(folder).inputs:
        for axis, said in enumerate(value.shape or ()):
            if isinstance(said, int):
                continue
            if axis == value.axis:
                batches += [f"{value.name}.{axis}"] if axis else []  # axis 0 is the batch for texts too
                continue
            if rows is None:
                raise InputError(
                    f"tensorrt: the input '{value.name}' has dynamic axes, and there are no calibration"
                    " samples to take their sizes from. Add data: {calibration: FILE.npz}.",
                    code="no-calibration-data",
                )
            # there the axis of the samples is the first
            place = axis if value.axis is None or axis > value.axis else axis + 1
            size = int(rows.values[value.name].shape[place])
            sizes[f"{value.name}.{axis}"] = SizeRange(size, size, size)
    made: list[DimensionRanges] = []
    for part in settings.each_profile():
        batch = SizeRange(1, part.opt_batch_size, part.max_batch_size)
        made.append({"batch": batch, **dict.fromkeys(batches, batch), **sizes})
    largest_profile(made)
    return made, None


def third_party_shapes(model: Any, ranges: Mapping[str, SizeRange], graph: str) -> ProfileShapes:
    """Return min, opt and max shape of every input of an ONNX model with an axis without a fixed size.

    Raises:
        RunError: an input has more such axes than texts have.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes: ProfileShapes = {}
    for value in model.graph.input:
        said = value.type.tensor_type.shape.dim
        if value.name in weights or all(d.dim_value > 0 for d in said):
            continue
        axes = [_axis_range(value.name, axis, size, ranges, graph) for axis, size in enumerate(said)]
        shapes[value.name] = (
            tuple(r.min for r in axes), tuple(r.opt for r in axes), tuple(r.max for r in axes),
        )  # fmt: skip
    return shapes


def _axis_range(name: str, axis: int, said: Any, ranges: Mapping[str, SizeRange], graph: str) -> SizeRange:
    if said.dim_value > 0:
        return SizeRange(said.dim_value, said.dim_value, said.dim_value)
    known = ranges.get(f"{name}.{axis}") or (ranges.get("batch") if axis == 0 else None)
    known = known or (ranges.get("input") if axis == 1 else None)
    if known is None:
        raise RunError(
            f"{graph}: axis {axis} of input '{name}' is dynamic, and no size is known for it. Export the"
            " graph with a fixed size.",
            code="unknown-axis-size",
            file=graph,
        )
    return known
