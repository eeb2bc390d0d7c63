"""What engines of graphs that somebody else exported are built for: ranges by axis, whatever their names.

Of an input of texts axis 0 is the batch and axis 1 the length. Of arrays one axis is the batch, and every
other axis that has no fixed size gets the size that the rows of the data have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.data import CUSTOM
from smelt.core.errors import InputError, RunError
from smelt.core.stage import Context
from smelt.export.tensorrt.profile import Range, Shapes
from smelt.export.tensorrt.ranges import Ranges, largest, profile_ranges
from smelt.export.tensorrt.settings import TensorrtSettings

_PLACES = ("calibration", "validation", "train")


def foreign_ranges(folder: Path, settings: TensorrtSettings, ctx: Context) -> tuple[list[Ranges], int | None]:
    """Return for each profile the range of the batch, and of each further axis of each input by `NAME.AXIS`.

    Raises:
        InputError: an axis has no fixed size, and there are no rows that a stage may see.
    """
    if ctx.task != CUSTOM:
        return profile_ranges(folder, settings, ctx)
    from smelt.runtime.foreign.signature import read_signature

    rows = next((ctx.data[place].arrays for place in _PLACES if place in ctx.data), None)
    sizes: Ranges = {}
    batches: list[str] = []
    for value in read_signature(folder).inputs:
        for axis, said in enumerate(value.shape or ()):
            if isinstance(said, int):
                continue
            if axis == value.axis:
                batches += [f"{value.name}.{axis}"] if axis else []  # axis 0 is the batch of texts too
                continue
            if rows is None:
                raise InputError(
                    f"tensorrt: the input '{value.name}' has axes of any size, and there are no calibration"
                    " rows to take a size from. Name some with data: {calibration: FILE.npz}.",
                    code="no-calibration-data",
                )
            # there the axis of the rows is the first
            place = axis if value.axis is None or axis > value.axis else axis + 1
            size = int(rows.values[value.name].shape[place])
            sizes[f"{value.name}.{axis}"] = Range(size, size, size)
    made: list[Ranges] = []
    for part in settings.each_profile():
        batch = Range(1, part.opt_batch_size, part.max_batch_size)
        made.append({"batch": batch, **dict.fromkeys(batches, batch), **sizes})
    largest(made)
    return made, None


def foreign_shapes(model: Any, ranges: Mapping[str, Range], graph: str) -> Shapes:
    """Return min, opt and max shape of every input of an ONNX model that has an axis of any size.

    Raises:
        RunError: an input has more axes without a size than texts have.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes: Shapes = {}
    for value in model.graph.input:
        said = value.type.tensor_type.shape.dim
        if value.name in weights or all(d.dim_value > 0 for d in said):
            continue
        axes = [_axis(value.name, axis, size, ranges, graph) for axis, size in enumerate(said)]
        shapes[value.name] = (
            tuple(r.min for r in axes), tuple(r.opt for r in axes), tuple(r.max for r in axes),
        )  # fmt: skip
    return shapes


def _axis(name: str, axis: int, said: Any, ranges: Mapping[str, Range], graph: str) -> Range:
    if said.dim_value > 0:
        return Range(said.dim_value, said.dim_value, said.dim_value)
    known = ranges.get(f"{name}.{axis}") or (ranges.get("batch") if axis == 0 else None)
    known = known or (ranges.get("input") if axis == 1 else None)
    if known is None:
        raise RunError(
            f"{graph}: input '{name}' has an axis {axis} of any size, which no size is known for.",
            code="unknown-axis-size",
            file=graph,
        )
    return known
