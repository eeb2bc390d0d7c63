"""What the rules say of an ONNX file that anybody may have written, asked in a process with limits.

The limits of memory and time, and what is looked at before any value is read (the size and the place of each
tensor, the names that hold the nodes together), are those of graphs that a recipe starts from; what ONNX
Runtime would say is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from smelt.core.errors import RunError
from smelt.export.tensorrt.preflight import Problem, load_graph, preflight
from smelt.runtime.foreign.examine import limits_for
from smelt.runtime.foreign.limits import FailedError, ask

_SHOWN = 20
_MEND = "Copy it again, or export the model again."


def check_file(path: Path) -> list[Problem]:
    """Return what TensorRT would reject of the file `path`, or silently do otherwise."""
    try:
        said = ask(__name__, [str(path)], limits_for(path))
    except OSError as error:
        return [_unreadable(path, f"{path}: cannot be read: {error.strerror}")]
    except FailedError as error:
        return [_unreadable(path, f"{path}: looking at it failed: {error}.")]
    return [Problem(*one) for one in said]


def answer(arguments: Sequence[str]) -> list[Problem]:
    """Look at the file that `arguments` name, in this process."""
    path = Path(arguments[0])
    try:
        model = load_graph(path)
        broken = list(dict.fromkeys(_broken(model, path)))
        if broken:  # no rule can look at values that are not there
            more = [f"and {len(broken) - _SHOWN} more"] * (len(broken) > _SHOWN)
            return [
                Problem("error", f"{said}.", "", _MEND, "damaged", path.name)
                for said in [*broken[:_SHOWN], *more]
            ]
        return preflight(model, path)
    except RunError as error:
        if "alloc" in str(error.__cause__).lower():  # the parser ran into the limit
            raise MemoryError from error
        return [_unreadable(path, str(error))]


def _broken(model: Any, path: Path) -> Iterator[str]:
    """Yield which tensors are not there as the file says, and what does not hang together."""
    from smelt.runtime.foreign.structure import structure_problems
    from smelt.runtime.foreign.tensors import tensor_problems

    yield from tensor_problems(model, path)
    yield from structure_problems(model)


def _unreadable(path: Path, reason: str) -> Problem:
    return Problem("error", reason, rule="unreadable", graph=path.name)
