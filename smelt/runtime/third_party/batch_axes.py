"""The axis of each input and output of a graph that holds the samples.

Axis 0, unless the dimension's name differs: in `x [batch, time, 8]` and `state [layers, batch, 16]`
the samples of `state` are on axis 1. A recipe's `data: {axes: ...}` overrides both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from smelt.core.readers.npz_arrays import SampleAxes

_BATCH = re.compile(r"\w*batch\w*", re.IGNORECASE)  # no `batch*heads`, which is a product


class _GraphValue(Protocol):
    """The properties of an input or output that are used."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int | str | None, ...] | None: ...

    def describe(self) -> str: ...


def batch_axes(
    inputs: Sequence[_GraphValue], outputs: Sequence[_GraphValue], given: SampleAxes
) -> dict[str, int | None]:
    """Return by name of each input and output the axis of the samples.

    None: it has none. An input is then the same in every call; an output cannot be
    divided into samples.

    Args:
        inputs: of the graph, with their known shapes.
        outputs: likewise.
        given: axes set by the user, of inputs or outputs.
    """
    batch = _batch_dimension_names(inputs, outputs, given)
    found: dict[str, int | None] = {}
    for value in inputs:
        place = None if value.shape == () else _named_batch_axis(value, batch) or 0
        found[value.name] = given.get(value.name, place)
    # named axes of the inputs that are not the batch: a time, a number of tokens
    others = {
        size
        for value in inputs
        for axis, size in enumerate(value.shape or ())
        if isinstance(size, str) and axis != found[value.name]
    }
    for value in (value for value in outputs if value.name not in found):  # an input may be an output too
        place = _named_batch_axis(value, batch)
        if place is None and None in (value.shape or ()):
            place = next((found[other.name] for other in inputs if other.shape == value.shape), None)
        if place is None and value.shape != () and not (value.shape and value.shape[0] in others):
            place = 0
        found[value.name] = given.get(value.name, place)
    return found


def batch_axis_problems(inputs: Sequence[_GraphValue], axes: SampleAxes, given: SampleAxes) -> Iterator[str]:
    """Yield why the sample axes of the inputs are ambiguous.

    Args:
        inputs: of the graph.
        axes: the result of `batch_axes`.
        given: axes set by the user, which are used unchanged.
    """
    sizes = {
        value.name: value.shape[axis]
        for value in inputs
        if value.shape and (axis := axes[value.name]) is not None and axis < len(value.shape)
    }
    fixed = {size for size in sizes.values() if isinstance(size, int)}
    open_sizes = any(not isinstance(size, int) for size in sizes.values())
    apart = len(fixed) > 1 or (max(fixed, default=1) > 1 and open_sizes)
    doubtful = [v for v in inputs if apart and isinstance(sizes.get(v.name), int)]
    doubtful += [v for v in inputs if v not in doubtful and _may_be_other_axis(v, inputs, axes, sizes)]
    unsaid = [value for value in doubtful if value.name not in given]
    if unsaid:
        shown = "; ".join(value.describe() for value in inputs)
        names = ", ".join(f"'{value.name}'" for value in unsaid)
        likely = ", ".join(f"{value.name}: {_likely_axis(value, inputs, sizes)}" for value in unsaid)
        written = f"data: {{axes: {{{likely}}}}}"
        yield (
            f"the first axes of the inputs disagree ({shown}), so it is not clear which axis of {names} holds"
            f" the samples. Set it, for example {written}; null for an array that is the same in every call."
        )


def _batch_dimension_names(
    inputs: Sequence[_GraphValue], outputs: Sequence[_GraphValue], given: SampleAxes
) -> list[str]:
    """Return the names of the batch dimension, the most likely first."""
    values = [*inputs, *outputs]
    said = [_dimension_at(value, axis) for value in values if (axis := given.get(value.name)) is not None]
    names = [size for value in values for size in value.shape or () if isinstance(size, str)]
    called = [name for name in names if _BATCH.fullmatch(name)]
    first = [size for value in values if isinstance(size := _dimension_at(value, 0), str)]
    of_inputs = {size for value in inputs if isinstance(size := _dimension_at(value, 0), str)}
    likely = sorted(
        (name for name in dict.fromkeys(first) if name in of_inputs),
        key=lambda name: (-first.count(name), -names.count(name)),
    )[:1]
    by_name = sorted(dict.fromkeys(called), key=lambda name: -names.count(name))
    return [name for name in dict.fromkeys([*said, *by_name]) if isinstance(name, str)] or likely


def _dimension_at(value: _GraphValue, axis: int) -> int | str | None:
    return value.shape[axis] if value.shape and axis < len(value.shape) else None


def _named_batch_axis(value: _GraphValue, batch: Sequence[str]) -> int | None:
    """Return the axis of a value with one of these names."""
    shape = value.shape or ()
    return next((shape.index(name) for name in batch if name in shape), None)


def _may_be_other_axis(
    value: _GraphValue, inputs: Sequence[_GraphValue], axes: SampleAxes, sizes: Mapping[str, int | str | None]
) -> bool:
    """Return whether the axis of a value has another name than in an input whose dimensions it shares."""
    size = sizes.get(value.name)
    if not isinstance(size, str) or _BATCH.fullmatch(size):
        return False
    mine = {name for name in value.shape or () if isinstance(name, str)}
    for other in inputs:
        its = sizes.get(other.name)
        if other is value or not isinstance(its, str) or its == size:
            continue
        # ambiguous is the one whose dimension others lack: position ids [tokens] for ids [batch, tokens]
        if mine & {name for name in other.shape or () if isinstance(name, str)}:
            return sum(s == size for s in sizes.values()) <= sum(s == its for s in sizes.values())
    return False


def _likely_axis(
    value: _GraphValue, inputs: Sequence[_GraphValue], sizes: Mapping[str, int | str | None]
) -> int | str:
    """Return the most likely axis of a value for the user to set, or `null`."""
    others = [other for other in inputs if other is not value]
    shape = value.shape or ()
    size = sizes.get(value.name)
    if isinstance(size, int) and any(size in (other.shape or ())[1:] for other in others):
        return 0
    batches = {sizes.get(other.name) for other in others}
    same = [axis for axis, size in enumerate(shape) if axis and size in batches]
    named = [axis for axis, size in enumerate(shape) if axis and not isinstance(size, int)]
    return next(iter([*same, *named]), "null")
