"""The axes of rows that a first recipe of a graph names: by names, by sizes of the arrays, by a call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from smelt.core.errors import InputError
from smelt.core.rows.arrays import shapes_in
from smelt.look.foreign import ForeignModel
from smelt.runtime.foreign.found_axes import output_axes
from smelt.runtime.foreign.signature import Signature, Value

Found = dict[str, int | None]
_TRIED = 8  # calls, where arrays have several axes as long as there are rows


def found_axes(seen: ForeignModel, file: Path) -> tuple[Found, list[str]]:
    """Return the axes that a recipe has to name for the arrays in `file`, and the outputs without rows.

    Raises:
        InputError: `unclear-rows`, an output has no part for each of the rows that every call takes.
    """
    signature = seen.signature
    shapes = shapes_in(file)
    sizes = {value.name: shapes[value.name].dims for value in signature.inputs if value.name in shapes}
    choices = _choices(signature, sizes)
    likely: Found = {name: axes[0] for name, axes in choices.items()}
    is_open = _is_open(signature, likely) or any(len(axes) > 1 for axes in choices.values())
    if seen.details.get("random") or not is_open:  # draws follow no rows
        return _needed(signature, likely), []
    inputs, outputs = _tried(seen, file, choices) or (likely, {})
    known = signature.with_axes(inputs)
    _require_rows(seen.file, known, outputs)
    defaults = {value.name: value.axis for value in known.outputs}
    changed: Found = {
        name: axes[0] for name, axes in outputs.items() if axes and defaults.get(name) not in axes
    }
    without = [name for name, axes in outputs.items() if axes is None]
    return _needed(signature, inputs) | changed, without


def _needed(signature: Signature, found: Found) -> Found:
    """Return what of the inputs' axes names do not say; all, where that leaves some unclear."""
    changed = {name: axis for name, axis in found.items() if axis != signature.axes[name]}
    return found if list(signature.with_axes(changed).unclear_axes(changed)) else changed


def _choices(signature: Signature, sizes: Mapping[str, Sequence[int]]) -> dict[str, list[int | None]]:
    """Return by input the axes that may hold the rows, the likeliest first."""
    axes = signature.axes
    counts = [d[axis] for name, d in sizes.items() if (axis := axes[name]) is not None and axis < len(d)]
    # of the lengths of first axes the one that most arrays have
    rows = max(counts, key=lambda c: (counts.count(c), sum(c in d for d in sizes.values()), c > 1), default=0)
    names = {value.name: _batch_name(value) for value in signature.inputs}
    found: dict[str, list[int | None]] = {}
    for value in signature.inputs:
        dims = sizes.get(value.name)
        if not dims:
            continue
        said, shape = axes[value.name], value.shape or ()
        places: list[int | None] = [axis for axis, size in enumerate(dims) if size == rows]
        if said in places and names[value.name]:
            places = [said]  # its name says so
        # inputs whose batch has one name are not the same in every call: their arrays do not fit each other
        one_name = names[value.name] and list(names.values()).count(names[value.name]) > 1
        fixed = {axis for axis, size in enumerate(shape) if isinstance(size, int)}
        ordered = sorted(places, key=lambda axis: (axis in fixed, axis != said, axis))
        found[value.name] = ordered or [said if one_name else None]
    return found


def _batch_name(value: Value) -> str | None:
    """Return the name of the dimension that holds the samples; None where it has none."""
    size = value.shape[value.axis] if value.shape and value.axis is not None else None
    return size if isinstance(size, str) else None


def _is_open(signature: Signature, inputs: Found) -> bool:
    """Say whether names leave open which axis of an output holds the rows."""
    known = signature.with_axes(inputs)
    named = {_batch_name(value) for value in known.inputs} - {None}
    return any(_batch_name(value) not in named for value in known.outputs if value.shape != ())


def _tried(
    seen: ForeignModel, file: Path, choices: Mapping[str, list[int | None]]
) -> tuple[Found, dict[str, list[int] | None]] | None:
    """Return the axes of inputs with which outputs follow the rows, and those of the outputs.

    With none of the choices all do: then the likeliest, of which a call could be made.
    """
    first = None
    for axes in itertools.islice(itertools.product(*choices.values()), _TRIED):
        inputs: Found = dict(zip(choices, axes, strict=True))
        outputs = output_axes(seen.file, seen.signature, file, inputs)
        if outputs is None:
            continue
        with_rows = [found for found in outputs.values() if found is not None]
        if with_rows and all(with_rows):
            return inputs, outputs
        first = first or (inputs, outputs)
    return first


def _require_rows(file: Path, known: Signature, outputs: Mapping[str, list[int] | None]) -> None:
    """Require that all outputs have parts for the rows of a call, where that takes several, always as many.

    Raises:
        InputError: `unclear-rows`.
    """
    without = [name for name, axes in outputs.items() if axes is None]
    if without and known.batch not in (None, 1):
        names = ", ".join(f"'{name}'" for name in without)
        raise InputError(
            f"{file}: every call takes {known.batch} rows, and what it gives as {names} has no part for each"
            " of them. Export the graph with a batch of any size or of 1, or without this output.",
            code="unclear-rows",
        )
