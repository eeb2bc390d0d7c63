"""Check ONNX files for what TensorRT rejects or computes differently, without TensorRT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError

if TYPE_CHECKING:
    from smelt.export.tensorrt.rules.checked_graph import TensorrtProblem
    from smelt.export.tensorrt.run_parser import ParserResult

_MAX_SHOWN = 3
"""Nodes listed for one problem; a quantized model can have hundreds."""


@dataclass(frozen=True)
class GraphCheck:
    """The check of one graph. problems: results of the rules. verdict: result of TensorRT's parser."""

    path: Path
    problems: tuple[TensorrtProblem, ...]
    verdict: ParserResult

    @property
    def rejected(self) -> bool:
        """Whether TensorRT would reject the graph, or build an engine with wrong results."""
        return bool(self.verdict.errors) or any(p.severity == "error" for p in self.problems)


def check_tensorrt_graphs(source: Path) -> list[GraphCheck]:
    """Check an ONNX file, or all graphs of a folder.

    Raises:
        InputError: there is no ONNX file.
    """
    return [_check_graph(path) for path in _onnx_files(source)]


def _onnx_files(given: Path) -> list[Path]:
    if given.is_file():
        return [given]
    if not given.is_dir():
        raise InputError(
            f"{given}: no such file or folder. Expected an ONNX file, or an artifact of the onnx stage.",
            code="missing-file",
            file=str(given),
        )
    found = sorted(given.glob("*.onnx")) or sorted(given.glob("onnx/*.onnx"))
    if not found:
        raise InputError(
            f"{given}: no .onnx file in this folder. Export the model first: onnx: {{target: tensorrt}}.",
            code="missing-graph",
            file=str(given),
        )
    return found


def _check_graph(path: Path) -> GraphCheck:
    from smelt.export.tensorrt.check_file import check_onnx_for_tensorrt
    from smelt.export.tensorrt.run_parser import ParserResult, run_parser

    problems = tuple(check_onnx_for_tensorrt(path))
    if any(problem.rule in ("unreadable", "damaged") for problem in problems):
        return GraphCheck(path, problems, ParserResult(None, why="cannot read the file."))
    return GraphCheck(path, problems, run_parser(path))


def describe_checks(checks: list[GraphCheck]) -> str:
    """Return the problems as text, grouped by kind."""
    return "\n".join(line for checked in checks for line in _problem_lines(checked))


def _problem_lines(checked: GraphCheck) -> Iterator[str]:
    from smelt.export.tensorrt.rules.rule_table import OUTCOMES

    kinds: dict[tuple[str, str, str], list[str]] = {}
    for problem in checked.problems:
        kind = OUTCOMES.get(problem.rule, "rejected")
        kinds.setdefault((kind, problem.reason, problem.hint), []).append(problem.location)
    yield f"{checked.path}: {_summary_line(checked)}"
    for (outcome, reason, hint), places in kinds.items():
        named = ", ".join(place for place in places[:_MAX_SHOWN] if place)
        more = f" and {len(places) - _MAX_SHOWN} more" if len(places) > _MAX_SHOWN else ""
        yield f"  {outcome}: {named}{more}{': ' if named else ''}{reason}"
        if hint:
            yield f"    -> {hint}"
    yield from _verdict_lines(checked.verdict)


def _summary_line(checked: GraphCheck) -> str:
    if checked.rejected:
        return "TensorRT would reject this"
    return "builds, with problems" if checked.problems else "no problems found"


def _verdict_lines(verdict: ParserResult) -> Iterator[str]:
    if verdict.asked is None:
        yield f"  TensorRT's parser was not run: {verdict.why}"
    elif not verdict.errors:
        yield f"  TensorRT's parser ({verdict.asked}): accepted"
    for error in verdict.errors:
        yield f"  TensorRT's parser ({verdict.asked}): {error}"


def checks_as_json(checks: list[GraphCheck]) -> list[dict[str, Any]]:
    """Return the checks as JSON values: file, verdict and problems of each graph."""
    from smelt.export.tensorrt.rules.rule_table import OUTCOMES

    return [
        {
            "file": str(c.path),
            "rejected": c.rejected,
            "problems": [
                {
                    "rule": p.rule, "outcome": OUTCOMES.get(p.rule, "rejected"), "location": p.location,
                    "message": p.reason, "hint": p.hint,
                }
                for p in c.problems
            ],
            "parser": {
                "version": c.verdict.asked, "errors": list(c.verdict.errors), "not_run": c.verdict.why,
            },
        }
        for c in checks
    ]  # fmt: skip
