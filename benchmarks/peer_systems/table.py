"""What the measured times say: ratios round by round, and the tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    """One system in one case.

    rounds: for each round `cpu_s` and `wall_s` of this system, and `ours`: the processor seconds in the
    same round of each artifact of smelt, by its name. texts: how many rows a round held. scored: how many
    rows the quality is of, if not of a round's. missing: why nothing was measured.
    """

    system: str
    precision: str
    ours: bool
    texts: int = 0
    version: str = ""
    rounds: list[dict[str, Any]] = field(default_factory=list)
    quality: str = ""
    missing: str = ""
    scored: int = 0

    def ms(self, kind: str = "cpu_s") -> float:
        """Return the median of the rounds, ms for each row."""
        return float(1000 * statistics.median(one[kind] for one in self.rounds) / self.texts)


def ratios(result: Result, reference: str) -> list[float]:
    """Return by how much the system takes longer than smelt's `reference`, round by round."""
    return [one["cpu_s"] / one["ours"][reference] for one in result.rounds if reference in one["ours"]]


def reference_of(result: Result, results: Sequence[Result]) -> str | None:
    """Return the artifact of smelt that `result` is set beside: the fastest of the same precision."""
    same = [one for one in results if one.ours and one.precision == result.precision and one.rounds]
    return min(same, key=lambda one: one.ms()).system if same else None


def median_and_range(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and all that the values range over."""
    if not values:
        return "-"
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _row(result: Result, results: Sequence[Result]) -> str:
    if not result.rounds:
        return f"| {result.system} | {result.precision} | - | - | - | - | {result.missing} |"
    reference = reference_of(result, results)
    against = "-" if reference is None else f"{median_and_range(ratios(result, reference))} of {reference}"
    cpu = [1000 * one["cpu_s"] / result.texts for one in result.rounds]
    wall = f"{result.ms('wall_s'):.2f}"
    name = f"**{result.system}**" if result.ours else result.system
    cells = [name, result.precision, median_and_range(cpu), wall, against, str(len(cpu)), result.quality]
    return f"| {' | '.join(cells)} |"


def fastest_text(results: Sequence[Result]) -> str:
    """Return a sentence on the fastest of the peers and of smelt, by precision and altogether."""
    sentences = []
    for kind in (*dict.fromkeys(one.precision for one in results), "any"):
        candidates = [one for one in results if one.rounds and kind in (one.precision, "any")]
        ours = [one for one in candidates if one.ours]
        theirs = [one for one in candidates if not one.ours]
        if not ours or not theirs:
            continue
        us, them = (min(side, key=lambda one: one.ms()) for side in (ours, theirs))
        times = median_and_range(ratios(them, us.system))
        label = "in any precision" if kind == "any" else f"in {kind}"
        verb = "wins" if statistics.median(ratios(them, us.system) or [1]) > 1 else "loses"
        sentences.append(f"{label} smelt {verb}: {them.system} takes {times} of {us.system}'s time")
    text = "; ".join(sentences)
    return f"{text[:1].upper()}{text[1:]}." if text else "Nothing to compare."


def draw_tables(cases: Mapping[str, Sequence[Result]], note: Mapping[str, str]) -> str:
    """Return a table for each case.

    Args:
        cases: the results of each case, by its title.
        note: a line on each case's rows: how many, what is counted as one.
    """
    parts = []
    for title, results in cases.items():
        head = "| system | precision | processor time, ms | clock, ms | ratio to smelt | rounds | quality |"
        rows = [_row(one, results) for one in results]
        lines = [
            f"### {title}",
            "",
            note[title],
            "",
            head,
            "|:--|:--|--:|--:|--:|--:|:--|",
            *rows,
            "",
            fastest_text(results),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def version_list(cases: Mapping[str, Sequence[Result]]) -> str:
    """Return a list of what ran, a line for each system."""
    versions = {one.system: one.version for results in cases.values() for one in results if one.version}
    return "\n".join(f"- {name}: {version}" for name, version in versions.items()) + "\n"
