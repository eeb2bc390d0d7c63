"""Check a third-party ONNX file with the TensorRT rules, in a subprocess with limits.

The limits of memory and time, and the checks before any value is read (size and offset of each tensor, names
that connect the nodes), are those of graphs that a recipe starts from. ONNX Runtime is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from smelt.core.errors import RunError
from smelt.core.messages import Message
from smelt.export.tensorrt.preflight import TensorrtProblem, load_graph, preflight
from smelt.runtimes.third_party.isolated_process import IsolatedProcessError, run_isolated
from smelt.runtimes.third_party.validate_graph import validation_limits

_MAX_PROBLEMS = 20
_REEXPORT_HINT = "Copy it again, or export the model again."


def check_onnx_for_tensorrt(path: Path) -> list[TensorrtProblem]:
    """Return the problems of the file `path`: what TensorRT rejects or silently computes differently."""
    try:
        answer = run_isolated(__name__, [str(path)], validation_limits(path))
    except OSError as error:
        return [_unreadable_problem(path, f"{path}: the file cannot be read: {error.strerror}")]
    except IsolatedProcessError as error:
        return [_unreadable_problem(path, f"{path}: the check failed: {error}.")]
    return [TensorrtProblem(*problem) for problem in answer]


def subprocess_main(arguments: Sequence[str]) -> list[TensorrtProblem]:
    """Check the file that `arguments` name, in this process."""
    path = Path(arguments[0])
    try:
        model = load_graph(path)
        broken = list(dict.fromkeys(_structural_problems(model, path)))
        if broken:  # rules cannot check values that are missing
            more = [f"and {len(broken) - _MAX_PROBLEMS} more"] * (len(broken) > _MAX_PROBLEMS)
            return [
                TensorrtProblem("error", f"{text}.", "", _REEXPORT_HINT, "damaged", path.name)
                for text in [*map(str, broken[:_MAX_PROBLEMS]), *more]
            ]
        return preflight(model, path)
    except RunError as error:
        if "alloc" in str(error.__cause__).lower():  # the parser reached the memory limit
            raise MemoryError from error
        return [_unreadable_problem(path, str(error))]


def _structural_problems(model: Any, path: Path) -> Iterator[Message]:
    """Yield the tensors that are not stored as the file declares, and broken connections."""
    from smelt.runtimes.third_party.graph_files import tensor_problems
    from smelt.runtimes.third_party.graph_structure import structure_problems

    yield from tensor_problems(model, path)
    yield from structure_problems(model)


def _unreadable_problem(path: Path, reason: str) -> TensorrtProblem:
    return TensorrtProblem("error", reason, rule="unreadable", graph=path.name)
