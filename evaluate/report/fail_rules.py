"""The rules of `smelt compare --fail-if`: what a later run may lose against the first one.

A rule that a step cannot be judged by has no result, which is not a pass: the step was skipped, other samples
were scored, or times are of other batch sizes or were disturbed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.evaluate.metrics.registry import METRICS
from smelt.evaluate.report import view
from smelt.evaluate.report.comparison import PAIR_REASONS

_SIZE, _LATENCY, _SPEEDUP, _OPERATIONS = "size", "latency", "speedup", "operations"
_FIELDS = {_SIZE: "size_bytes", _OPERATIONS: "operations", _LATENCY: "latency_ms", _SPEEDUP: "speedup"}
_RULE = re.compile(
    r"(?P<what>[\w.:]+(?:\(.+?\))?) +(?P<change>drops|rises) +(?P<limit>\d+(?:\.\d+)?) *(?P<percent>%?)"
    r"(?: +at +(?P<step>\S+))?"
)
_REASONS = {
    **PAIR_REASONS,
    "no-step": "the step was skipped, failed or is missing",
    "not-measured": "it was not measured",
    "disturbed-times": "other work disturbed the times",
    "other-batch-size": "the batch sizes differ",
    "other-threads": "the numbers of threads differ",
    "other-machine": "the runs are of different machines",
    "zero-reference": "the value of the first run is 0, of which there is no percentage",
}


@dataclass(frozen=True)
class Regression:
    """A broken rule of `--fail-if`: the step, the run, and by how much the quantity changed."""

    rule: str
    step: str
    run: str
    change: float

    def __str__(self) -> str:
        return f"{self.rule}: {self.run}, step {self.step}: {view.signed_text(self.change)}"


@dataclass(frozen=True)
class NotJudged:
    """A rule of `--fail-if` that a step of a run cannot be judged by; reason: a code."""

    rule: str
    step: str
    run: str
    reason: str

    def __str__(self) -> str:
        text = _REASONS.get(self.reason, self.reason)
        return f"{self.rule}: {self.run}, step {self.step}: {text}"


def check_rules(comparison: Mapping[str, Any], rules: Sequence[str]) -> list[Regression | NotJudged]:
    """Return where a later run breaks a rule such as `bleu drops 0.5` or `size rises 5% at onnx-int8`.

    A rule names a metric, `size` (MB), `operations` (multiply-adds), `latency` (ms) or `speedup`; `drops` or
    `rises`; the largest change that is accepted, in the quantity's unit or in percent of the first run; and
    optionally a step. Without a step it is checked at every step of which the first run has the quantity.

    Raises:
        InputError: a rule that cannot be read (`wrong-rule`), or that nothing of the runs can be checked by
            (`nothing-to-compare`).
    """
    return [finding for rule in rules for finding in _check(comparison, rule.strip())]


def _check(comparison: Mapping[str, Any], rule: str) -> list[Regression | NotJudged]:
    parts = _parse(comparison, rule)
    limit, sign = float(parts["limit"]), -1 if parts["change"] == "drops" else 1
    findings: list[Regression | NotJudged] = []
    pairs = list(_pairs(comparison, parts["what"], parts["step"]))
    for step, run, first_entry, entry in pairs:
        reason = _unjudged_reason(first_entry, entry, parts["what"], comparison["same_machine"])
        reference = _quantity(first_entry, parts["what"])
        if parts["percent"] and not reference:
            reason = reason or "zero-reference"
        if reason:
            findings.append(NotJudged(rule, step, run, reason))
            continue
        change = _quantity(entry, parts["what"]) - reference
        change = 100 * change / abs(reference) if parts["percent"] else change
        if sign * change > limit:
            findings.append(Regression(rule, step, run, change))
    if not pairs:
        raise InputError(
            f"--fail-if {rule!r}: no step of {comparison['reference']} has this quantity. Steps:"
            f" {', '.join(step['step'] for step in comparison['steps'])}.",
            code="nothing-to-compare",
        )
    return findings


def _parse(comparison: Mapping[str, Any], rule: str) -> re.Match[str]:
    parts = _RULE.fullmatch(rule)
    entries = [entry for step in comparison["steps"] for entry in step["runs"] if entry]
    scored_metrics = dict.fromkeys(metric for entry in entries for metric in entry["quality"])
    quantities = [*scored_metrics, *_FIELDS]
    if parts is None or parts["what"] not in (*quantities, *METRICS):
        hint = did_you_mean(parts["what"], quantities) if parts else ""
        raise InputError(
            f"--fail-if: cannot read {rule!r}. Expected QUANTITY drops|rises NUMBER[%] [at STEP], such as"
            f" 'bleu drops 0.5' or 'size rises 5% at onnx-int8'. Quantities: {', '.join(quantities)}.{hint}",
            code="wrong-rule",
        )
    return parts


def _pairs(
    comparison: Mapping[str, Any], what: str, step_name: str | None
) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any] | None]]:
    """Yield step, later run, the first run's entry with the quantity, and the later run's entry."""
    names = [run["name"] for run in comparison["runs"]]
    for step in comparison["steps"]:
        first_run, *later_runs = step["runs"]
        if first_run is None or step_name not in (None, step["step"]) or _quantity(first_run, what) is None:
            continue
        for name, entry in zip(names[1:], later_runs, strict=True):
            yield step["step"], name, first_run, entry


def _quantity(entry: Mapping[str, Any] | None, what: str) -> Any:
    if entry is None:
        return None
    if what in _FIELDS:
        value = entry[_FIELDS[what]]
        return value / 1e6 if what == _SIZE and value is not None else value
    return entry["quality"].get(what, {}).get("value")


def _unjudged_reason(
    before: Mapping[str, Any], entry: Mapping[str, Any] | None, what: str, same_machine: bool
) -> str | None:
    """Return the code of why a quantity of two runs cannot be compared; None if it can."""
    if entry is None:
        return "no-step"
    if _quantity(entry, what) is None:
        return "not-measured"
    if what in (_SIZE, _OPERATIONS):
        return None
    if what not in _FIELDS:
        reason: str | None = entry["quality"][what].get("reason")
        return reason
    different = {
        "other-batch-size": before["batch_size"] != entry["batch_size"],
        "disturbed-times": False in (before["stable"], entry["stable"]),
        "other-threads": before["threads"] != entry["threads"],
        "other-machine": what == _LATENCY and not same_machine,
    }
    return next((reason for reason, differs in different.items() if differs), None)
