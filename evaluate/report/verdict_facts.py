"""The figures of the step that a verdict names, next to those of the baseline; all renderings show them."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.core.messages import count_text
from smelt.evaluate.report import view
from smelt.evaluate.report.quality_loss import Scored, is_worse, judged_metrics
from smelt.evaluate.report.schema import ReportData, StepReport, Verdict


@dataclass(frozen=True)
class Fact:
    """One quantity of the named step.

    value: the baseline's and the step's, such as `22.5 → 2.68 ms`. rest: the ratio or difference, its
    interval, and how it was measured. is_bad: whether a limit is not met, or the loss is significant.
    """

    label: str
    value: str
    rest: str
    is_bad: bool = False

    @property
    def text(self) -> str:
        """Value and rest as one text."""
        return ", ".join(part for part in (self.value, self.rest) if part)


def named_step(report: ReportData) -> StepReport | None:
    """Return the step that the verdict recommends, else the one that it calls closest."""
    name = (report.verdict.step or report.verdict.closest) if report.verdict else None
    return next((step for step in report.steps if step.name == name), None)


def verdict_facts(report: ReportData) -> list[Fact]:
    """Return speed, size, memory, quality and gates of the step that the verdict names; empty without one.

    Quality and its gates are of test where the step was scored there, else of the split that judges.
    """
    step, base, verdict = named_step(report), report.baseline_step, report.verdict
    if step is None or base is None or verdict is None:
        return []
    gates = _gates_fact(step, report.judged_on)
    return [
        *_speed_facts(report, step, base, verdict),
        *_size_facts(step, base),
        *_quality_facts(report, step, base),
        *([gates] if gates else []),
    ]


def _speed_facts(report: ReportData, step: StepReport, base: StepReport, verdict: Verdict) -> list[Fact]:
    sizes = view.batch_sizes(report)
    times = step.latency_at(sizes[0]) if sizes else None
    if times is None:
        return []
    setting = f"batch {times.batch_size}"
    setting += f", {count_text(times.threads, 'thread')}" if times.threads else ""
    is_disturbed = times.stable is False
    if verdict.reason == "fastest-by-cpu-time" or (is_disturbed and times.cpu_speedup is not None):
        ratio = f"{view.significant_digits(times.cpu_speedup, 2)}×"
        interval = f"{view.interval_text(times.cpu_speedup_ci95)}, ".lstrip(", ")
        return [Fact("speed", f"about {ratio} by CPU time", f"{interval}{setting}")]
    if is_disturbed:
        return [Fact("speed", "unknown", "because its times were disturbed")]
    base_times = base.latency_at(times.batch_size)
    base_ms = times.baseline_p50_ms or (base_times and base_times.p50_ms)
    before = f"{view.significant_digits(base_ms)} → " if base_ms else ""
    ratio = f"{view.speedup_text(times)} {view.interval_text(times.speedup_ci95)}".rstrip()
    runners = f", {base.runner} → {step.runner}" if base.runner and step.runner else ""
    value = f"{before}{view.significant_digits(times.p50_ms)} ms"
    return [Fact("speed", value, f"{ratio}{runners}, {setting}")]


def _size_facts(step: StepReport, base: StepReport) -> list[Fact]:
    facts = []
    if step.size_bytes and base.size_bytes:
        value = view.size_text(base.size_bytes, step.size_bytes)
        dtype = view.differing_dtype(step, base)
        dtype_text = f"; unquantized weights in {dtype}" if dtype else ""
        facts.append(Fact("size", value, f"{view.size_percent_text(step, base)} of {base.name}{dtype_text}"))
    if step.peak_memory_bytes and base.peak_memory_bytes:
        value = view.size_text(base.peak_memory_bytes, step.peak_memory_bytes)
        facts.append(Fact("memory", value, "peak of the process while timed"))
    if step.gpu_memory_bytes:
        value = view.size_text(step.gpu_memory_bytes)
        if base.gpu_memory_bytes:
            value = view.size_text(base.gpu_memory_bytes, step.gpu_memory_bytes)
        facts.append(Fact("GPU memory", value, "held by the process after it was timed"))
    return facts


def _quality_facts(report: ReportData, step: StepReport, base: StepReport) -> list[Fact]:
    """Return the first metric, and the others by which the step is significantly worse."""
    pairs: list[tuple[Scored, Scored, str]] = [(step, base, report.judged_on)]
    if step.test and base.test:
        pairs.append((step.test, base.test, "test"))
    scored, base_scored, split = pairs[-1]
    metrics = judged_metrics(report)
    facts = []
    for metric in metrics:
        score, before = scored.quality.get(metric), base_scored.quality.get(metric)
        difference = scored.against_baseline.get(metric)
        is_loss = is_worse(scored, metric)
        if score is None or before is None or difference is None or not (metric == metrics[0] or is_loss):
            continue
        digits = view.metric_digits(metric)
        value = f"{view.number_text(before.value, digits)} → {view.number_text(score.value, digits)}"
        change = view.difference_and_interval_text(difference, metric)
        samples = f"{split}, n = {score.n:,}{' tokens' * (view.sample_unit(metric) == 'token')}"
        rest = f"{change}, {view.p_value_text(difference.p_value)} ({samples})"
        facts.append(Fact("quality", f"{value} {view.metric_label(metric)}", rest, is_loss))
    return facts


def _gates_fact(step: StepReport, judged_on: str) -> Fact | None:
    """Return the gates, as judged on test where they were; also as judged before, if the result is worse."""
    rank = view.GATE_VERDICTS.index
    entries = []
    for before, gate in zip(step.gates, view.final_gates(step), strict=True):
        text, result = view.gate_result_text(gate), view.gate_verdict(gate)
        if gate is not before and rank(view.gate_verdict(before)) < rank(result):
            value = f"{view.metric_label(before.metric)} {view.gate_value_text(before)}"
            entries.append((f"on {judged_on} {value}", view.gate_verdict(before)))
            text = f"on test {text}"
        entries.append((text, result))
    if not entries:
        return None
    worst = min((result for _, result in entries), key=rank)
    texts = [text + (f": {result}" if result != worst else "") for text, result in entries]
    return Fact("gates", worst, "; ".join(texts), worst != view.GATE_VERDICTS[-1])
