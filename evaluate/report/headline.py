"""What a report says first: whether it is a trial, and which step is the one to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smelt.evaluate.report import view
from smelt.evaluate.report.schema import Latency, Report, Step

# Processor time tells no smaller difference: other work that shares caches makes some slower than others.
_ALIKE = 0.10


@dataclass(frozen=True)
class Headline:
    """The one step that a report recommends.

    trial: that the run used only some of the rows, or None. pick: the fastest step that can be deployed
    and fails no gate, None where there is none or no speed may be claimed; times: its row at the smallest
    batch. withheld: why no step is named although some were timed, or None; likely: the step that it says to
    be the fastest by processor time.
    """

    trial: str | None
    pick: Step | None = None
    times: Latency | None = None
    withheld: str | None = None
    likely: Step | None = None


def headline(report: Report) -> Headline:
    """Return what to say first of `report`.

    One notion of speed: the paired speed-up over the baseline at the smallest batch size. Where the times
    of a step that competes were disturbed and it may be the fastest, nobody knows which one is, so none is
    named. It may be where any of its rounds, disturbed or not, reached the interval of the fastest other.
    """
    trial, sizes = _trial(report), view.batch_sizes(report)
    done = [
        step
        for step in report.steps
        if step.status in ("done", "cached") and step.name != report.baseline and step.deployable is not False
    ]
    timed = [
        (step, row)
        for step in done
        if (row := step.at(sizes[0]) if sizes else None) and row.speedup is not None
    ]
    scored = [step for step in done if step.quality]
    if scored and all(_at_chance(step) for step in scored):
        return Headline(trial, withheld=_only_chance(scored[0]))
    able = [(step, row) for step, row in timed if not _at_chance(step)]
    fit = [(step, row) for step, row in able if all(gate.passed is not False for gate in step.gates)]
    if not fit:
        return Headline(trial, withheld="No step keeps all its gates." if timed else None)
    calm = [(step, row) for step, row in fit if row.stable is not False]
    step, row = max(calm or fit, key=lambda pair: pair[1].speedup or 0.0)
    rivals = [(s, r) for s, r in fit if r.stable is False and (not calm or _may_be_faster(r, row))]
    if rivals:
        known = [(step, row) for step, row in fit if row.cpu_speedup is not None]
        best = _smallest_of_the_fastest(known)
        told = [_tell(report, *best, by_processor=True)] if best else []
        return Headline(trial, withheld=" ".join([*told, _disturbed(rivals)]), likely=best and best[0])
    return Headline(trial, step, row)


def _smallest_of_the_fastest(known: Sequence[tuple[Step, Latency]]) -> tuple[Step, Latency] | None:
    """Return the smallest of the steps that processor time cannot tell from the fastest; None of none."""
    if not known:
        return None
    _, fastest = max(known, key=lambda pair: pair[1].cpu_speedup or 0.0)
    ratio = fastest.cpu_speedup or 0.0
    low = min(ratio * (1 - _ALIKE), *(fastest.cpu_speedup_ci95 or (ratio,)))
    alike = [
        (step, row)
        for step, row in known
        if max(row.cpu_speedup or 0.0, *(row.cpu_speedup_ci95 or (0.0,))) >= low
    ]
    return min(alike, key=lambda pair: pair[0].size_bytes or 0)


def _at_chance(step: Step) -> bool:
    return any(score.at_chance for score in list(step.quality.values())[:1])


def _only_chance(step: Step) -> str:
    metric, score = next(iter(step.quality.items()))
    return (
        f"No step is recommended: none is better than no model at all ({step.name}: {view.label(metric)}"
        f" {view.number(score.value, view.digits(metric))}, without a model"
        f" {view.number(score.chance, view.digits(metric))})."
    )


def _may_be_faster(disturbed: Latency, fastest: Latency) -> bool:
    reached = [one.speedup for one in disturbed.rounds or [] if one.speedup is not None]
    if not reached or not fastest.speedup_ci95:
        return True
    return max(reached) >= fastest.speedup_ci95[0]


def lines(report: Report) -> list[str]:
    """Return the headline as sentences, for a terminal and for Markdown."""
    found = headline(report)
    said = [found.trial] if found.trial else []
    if found.withheld:
        said.append(found.withheld)
    if found.pick and found.times:
        said.append(_recommend(report, found.pick, found.times))
    return said


def _trial(report: Report) -> str | None:
    """Say that rows were left out; a limit that no split reaches leaves none out."""
    limit, rows = report.recipe.get("limit"), report.recipe.get("rows")
    if not isinstance(limit, int):
        return None
    used = rows if isinstance(rows, Mapping) else {}
    if used and all(isinstance(n, int) and n < limit for n in used.values()):
        return None
    return f"A trial on {view.counted(used.get(report.judged_on, limit), 'row')}, not a result."


def _disturbed(steps: list[tuple[Step, Latency]]) -> str:
    names = ", ".join(step.name for step, _ in steps)
    return (
        f"No speed by the clock is claimed of {names}: {view.doubt(row for _, row in steps)}."
        " Run again when the machine is quiet; only these are timed again."
    )


def _recommend(report: Report, step: Step, times: Latency) -> str:
    gated = " that fails no gate" if any(s.gates for s in report.steps) else ""
    return f"Fastest step{gated}: {_tell(report, step, times)}"


def _tell(report: Report, step: Step, times: Latency, by_processor: bool = False) -> str:
    """Return name, speed-up, score and size of a step; the speed-up by the clock or by processor time."""
    if by_processor:
        ratio, ends, how = times.cpu_speedup, times.cpu_speedup_ci95, " by CPU time"
    else:
        ratio, ends, how = times.speedup, times.speedup_ci95, ""
    fast = view.significant_digits(ratio, 2) if by_processor else view.number(ratio)
    parts = [
        f"{step.name}, {'about ' * by_processor}{fast}× {view.interval(ends)}".rstrip()
        + f"{how} at batch {times.batch_size}"
    ]
    metric = next(iter(view.metrics(report)), None)
    for of, found in (("", step), ("on test ", step.test)):
        if metric and found and (score := found.quality.get(metric)):
            shown = view.digits(metric)
            lost = found.against_baseline.get(metric)
            change = f" ({view.change(lost, metric)}, {view.probability(lost.p_value)})" if lost else ""
            parts.append(f"{of}{view.label(metric)} {view.number(score.value, shown)}{change}")
    share = view.ratio_of_size(step, report.base)
    of_base = f" ({100 * share:.0f} % of {report.baseline})" if share is not None else ""
    parts.append(f"{view.megabytes(step.size_bytes)} MB{of_base}")
    return "; ".join(parts) + "."
