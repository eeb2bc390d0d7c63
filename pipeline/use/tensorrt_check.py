"""What TensorRT would reject of an ONNX file, or silently do otherwise; needs no TensorRT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError

if TYPE_CHECKING:
    from smelt.export.tensorrt.ask_parser import Verdict
    from smelt.export.tensorrt.rules.graph import Problem

_SHOWN = 3
"""Places of one finding that are named; a quantized model has hundreds."""


@dataclass(frozen=True)
class Checked:
    """One graph. problems: what the rules found. verdict: what the installed TensorRT said."""

    path: Path
    problems: tuple[Problem, ...]
    verdict: Verdict

    @property
    def rejected(self) -> bool:
        """Whether TensorRT would refuse it, or build it into something wrong."""
        return bool(self.verdict.errors) or any(p.severity == "error" for p in self.problems)


def check_graphs(given: Path) -> list[Checked]:
    """Check an ONNX file, or all graphs of a folder.

    Raises:
        InputError: there is no ONNX file.
    """
    return [_check(path) for path in _graphs(given)]


def _graphs(given: Path) -> list[Path]:
    if given.is_file():
        return [given]
    if not given.is_dir():
        raise InputError(
            f"{given}: no such file or folder. Give an ONNX file, or an artifact of the onnx step.",
            code="missing-file",
            file=str(given),
        )
    found = sorted(given.glob("*.onnx")) or sorted(given.glob("onnx/*.onnx"))
    if not found:
        raise InputError(
            f"{given}: no .onnx file in this folder. Export it first: onnx: {{target: tensorrt}}.",
            code="missing-graph",
            file=str(given),
        )
    return found


def _check(path: Path) -> Checked:
    from smelt.export.tensorrt.ask_parser import Verdict, ask_parser
    from smelt.export.tensorrt.check_file import check_file

    problems = tuple(check_file(path))
    if any(problem.rule in ("unreadable", "damaged") for problem in problems):
        return Checked(path, problems, Verdict(None, why="the file cannot be read."))
    return Checked(path, problems, ask_parser(path))


def describe_checks(checks: list[Checked]) -> str:
    """Return the findings as text, those of one kind together."""
    return "\n".join(line for checked in checks for line in _lines(checked))


def _lines(checked: Checked) -> Iterator[str]:
    from smelt.export.tensorrt.rules.table import OUTCOMES

    kinds: dict[tuple[str, str, str], list[str]] = {}
    for problem in checked.problems:
        kind = OUTCOMES.get(problem.rule, "rejected")
        kinds.setdefault((kind, problem.reason, problem.mend), []).append(problem.place)
    yield f"{checked.path}: {_summary(checked)}"
    for (outcome, reason, mend), places in kinds.items():
        named = ", ".join(place for place in places[:_SHOWN] if place)
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        yield f"  {outcome}: {named}{more}{': ' if named else ''}{reason}"
        if mend:
            yield f"    -> {mend}"
    yield from _said(checked.verdict)


def _summary(checked: Checked) -> str:
    if checked.rejected:
        return "TensorRT would not take this"
    return "builds, but" if checked.problems else "nothing found that TensorRT would reject"


def _said(verdict: Verdict) -> Iterator[str]:
    if verdict.asked is None:
        yield f"  TensorRT's own parser was not asked: {verdict.why}"
    elif not verdict.errors:
        yield f"  TensorRT's own parser ({verdict.asked}) takes it"
    for error in verdict.errors:
        yield f"  TensorRT's own parser ({verdict.asked}): {error}"


def as_json(checks: list[Checked]) -> list[dict[str, Any]]:
    """Return the findings for JSON: of each graph its file, verdict and problems."""
    from smelt.export.tensorrt.rules.table import OUTCOMES

    return [
        {
            "file": str(c.path),
            "rejected": c.rejected,
            "problems": [
                {
                    "rule": p.rule, "outcome": OUTCOMES.get(p.rule, "rejected"), "place": p.place,
                    "reason": p.reason, "mend": p.mend,
                }
                for p in c.problems
            ],
            "parser": {"asked": c.verdict.asked, "errors": list(c.verdict.errors), "why": c.verdict.why},
        }
        for c in checks
    ]  # fmt: skip
