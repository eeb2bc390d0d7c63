"""Shared by the renderings of a report (terminal, Markdown, HTML): order, names, numbers as text, notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smelt.core.messages import Message, count_text, duration_text
from smelt.data.tasks import ALL_TASKS, tasks_with
from smelt.evaluate.metrics.registry import (
    METRICS,
    WINDOW_METRICS,
    base_metric,
    find_metric,
    is_custom_metric,
)
from smelt.evaluate.report.detail_notes import detail_notes
from smelt.evaluate.report.disturbance import disturbed_texts
from smelt.evaluate.report.schema import ReportData, StepReport
from smelt.evaluate.report.step_schema import (
    ClassifierTimings,
    GateReport,
    GenerationTimings,
    LatencyReport,
    ScoreDifference,
    ScoresOnTest,
)
from smelt.tasks.registry import task_spec
from smelt.tasks.spec import TaskSpec

MISSING_TEXT = "–"
MINUS = "−"
DISTURBED_MARK = "?"  # after a speed-up whose times were disturbed
SIGNIFICANCE_LEVEL = 0.05
_MIN_BYTES_IN_MB = 100_000  # smaller sizes are shown in kB
MAX_DIGITS = 6  # smaller differences are float noise
_TITLES = {name: metric.title for name, metric in METRICS.items()}
_TITLES |= {
    "size_bytes": "size",
    "operations": "multiply-adds",
    "speedup": "speed-up",
    "cpu_speedup": "speed-up by CPU time",
}


@dataclass(frozen=True)
class TreeRow:
    """A step and the tree branches before its name, for example `│  └─ `."""

    step: StepReport
    branch: str


def tree_rows(report: ReportData) -> list[TreeRow]:
    """Return the steps depth first. A single child keeps its parent's indent, other branches are drawn."""
    children: dict[str | None, list[StepReport]] = {}
    for step in report.steps:
        children.setdefault(step.parent, []).append(step)
    ordered = []
    stack = _tree_branches(children.get(None, []), "", root=True)
    while stack:
        step, row_indent, child_indent = stack.pop()
        ordered.append(TreeRow(step, row_indent))
        stack += _tree_branches(children.get(step.name, []), child_indent)
    return ordered


def _tree_branches(
    steps: Sequence[StepReport], indent: str, root: bool = False
) -> list[tuple[StepReport, str, str]]:
    """Return (step, text before it, text before its descendants), the last one first."""
    if root or len(steps) == 1:
        return [(step, indent, indent) for step in reversed(steps)]
    branches = [(step, indent + "├─ ", indent + "│  ") for step in steps[:-1]]
    branches += [(step, indent + "└─ ", indent + "   ") for step in steps[-1:]]
    return branches[::-1]


def metric_names(report: ReportData) -> list[str]:
    """Return the quality metrics of the report in the order of their first occurrence."""
    return list(dict.fromkeys(metric for step in report.steps for metric in step.quality))


def batch_sizes(report: ReportData) -> list[int]:
    """Return the batch sizes that were timed, smallest first."""
    return sorted({entry.batch_size for step in report.steps for entry in step.latency})


def metric_label(metric: str) -> str:
    """Return the metric's name as used in papers."""
    return _TITLES.get(metric) or (find_metric(metric).title if base_metric(metric) in METRICS else metric)


def metric_digits(metric: str | None) -> int:
    """Return the number of decimal places of a value of `metric`."""
    is_known = metric is not None and (base_metric(metric) in METRICS or is_custom_metric(metric))
    return find_metric(metric).digits if metric is not None and is_known else 2


def report_title(report: ReportData) -> str:
    """Return the recipe's name; where the report does not contain it, the model's."""
    return str(report.recipe.get("name") or model_name(report))


def status_text(report: ReportData) -> str:
    """Return the status of the run; without gates nothing was passed: "finished"."""
    has_gates = any(step.gates or (step.test and step.test.gates) for step in report.steps)
    return "finished" if report.status == "passed" and not has_gates else report.status


def model_name(report: ReportData) -> str:
    """Return the model of the recipe: a name, or the last part of a path."""
    model = report.recipe.get("model")
    if isinstance(model, Mapping):
        model = model.get("config")
    return str(model).rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1] if model else "model"


def hardware(report: ReportData) -> str:
    """Return the processor and accelerator of the environment as text."""
    cpu, cores = report.environment.get("cpu"), report.environment.get("cores")
    parts = [str(cpu)] if cpu else []
    parts += [f"{cores} core{'' if cores == 1 else 's'}"] if cores else []
    gpus = report.environment.get("gpus") or []
    parts += [str(gpu.get("name") if isinstance(gpu, Mapping) else gpu) for gpu in gpus]
    return ", ".join(parts) or MISSING_TEXT


def run_facts(report: ReportData) -> list[tuple[str, str]]:
    """Return (name, text) of what was run, where and when."""
    environment = report.environment
    seconds, versions = report.seconds, environment.get("versions") or {}
    entries = [
        ("Model", model_name(report)),
        ("Task", report.recipe.get("task")),
        ("Data", sample_text(report)),
        ("Baseline", report.baseline),
        ("Machine", hardware(report)),
        ("smelt", versions.get("smelt")),
        ("Date", report.started and report.started.replace("T", " ")),
        ("Duration", None if seconds is None else duration_text(seconds)),
    ]
    return [(name, str(value)) for name, value in entries if value]


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value_text(item)}" for name, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as (dotted name, text) pairs."""
    entries: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            entries += flatten(value, f"{prefix}{name}.")
        else:
            entries.append((f"{prefix}{name}", MISSING_TEXT if value is None else _value_text(value)))
    return entries


def sample_size(report: ReportData) -> tuple[int, str] | None:
    """Return the number and unit of what the first metric was computed on: examples, or tokens."""
    sizes = (
        (score.n, sample_unit(metric)) for step in report.steps for metric, score in step.quality.items()
    )
    return next(sizes, None)


def sample_unit(metric: str) -> str:
    """Return the unit of a metric's `n`."""
    return "token" if metric in WINDOW_METRICS else "example"


def sample_text(report: ReportData) -> str:
    """Return `validation, n = 1,000 examples`; empty where nothing was scored."""
    size = sample_size(report)
    return f"{report.judged_on}, n = {count_text(*size)}" if size else ""


def signatures(report: ReportData) -> list[tuple[str, str]]:
    """Return (metric, signature), each pair once."""
    pairs = ((m, q.signature) for step in report.steps for m, q in step.quality.items())
    return list(dict.fromkeys(pairs))


def speedup_text(row: LatencyReport | None) -> str:
    """Return the speed-up as `5.94×`, or `5.94×?` where it was disturbed."""
    if row is None or row.speedup is None:
        return MISSING_TEXT
    return f"{number_text(row.speedup)}×{DISTURBED_MARK if row.stable is False else ''}"


def median_text(row: LatencyReport | None) -> str:
    """Return the p50 in ms as `14.2`, or `14.2?` where it was disturbed."""
    if row is None:
        return MISSING_TEXT
    return significant_digits(row.p50_ms) + (DISTURBED_MARK if row.stable is False else "")


def cpu_speedup_text(row: LatencyReport) -> str:
    """Return the speed-up by processor time as `5.94×`."""
    return MISSING_TEXT if row.cpu_speedup is None else f"{number_text(row.cpu_speedup)}×"


def find_task(report: ReportData) -> TaskSpec:
    """Return the task of a report; the defaults of all tasks for one that this version does not know."""
    name = str(report.recipe.get("task"))
    return task_spec(name) if name in ALL_TASKS else TaskSpec()


def timing_parts(
    report: ReportData, timings: GenerationTimings | ClassifierTimings
) -> list[tuple[str, float | None]]:
    """Return (name, ms) of the parts of a call, in their order."""
    if isinstance(timings, ClassifierTimings):
        task = find_task(report)
        return [
            (task.preprocessing, timings.tokenizing_ms),
            ("model", timings.model_ms),
            (task.postprocessing, timings.rest_ms),
        ]
    first = "prefill" if report.recipe.get("task") in tasks_with(architecture="decoder") else "encoder"
    return [
        ("tokenizing", timings.tokenizing_ms),
        (first, timings.encoding_ms),
        ("time to first token", timings.time_to_first_token_ms),
        ("time per output token", timings.time_per_output_token_ms),
        ("detokenizing", timings.detokenizing_ms),
    ]


def latency_scope(report: ReportData) -> str:
    """Return the start and the end of the timed part."""
    return find_task(report).call


def timed_baseline(report: ReportData) -> str:
    """Return how the baseline was timed, in parentheses after its name; empty for torch's eager mode."""
    latency = (report.recipe.get("score") or {}).get("latency") or {}
    return " (timed as compiled by torch.compile)" if latency.get("baseline") == "compiled" else ""


def runtime_label(step: StepReport) -> str:
    """Return the runtime of the step's artifact: format and target."""
    return " · ".join(part for part in (step.format, step.target) if part) or MISSING_TEXT


def score_texts(scored: StepReport | ScoresOnTest) -> list[str]:
    """Return the first metric, and its difference from the baseline, as `BLEU 37.05`, `−1.37* [...]`."""
    if not scored.quality:
        return []
    metric, score = next(iter(scored.quality.items()))
    texts = [f"{metric_label(metric)} {number_text(score.value, metric_digits(metric))}"]
    if difference := scored.against_baseline.get(metric):
        texts.append(difference_and_interval_text(difference, metric))
    return texts


def measured_elsewhere_text(step: StepReport) -> str:
    """Return where a graph for GPUs was measured instead; empty for other steps."""
    if step.deployable is not False or step.format != "onnx":
        return ""
    verb = "scored and timed" if step.latency else "scored"
    return f"{verb} in {step.runner} on the CPU, not in its runtime ({step.target}), and no candidate."


def is_significant(difference: ScoreDifference) -> bool:
    """Return whether the difference is significant at 5 %, and not zero in all digits that are shown.

    Its p-value, of this one comparison, is below 0.05, and its interval excludes zero: where few outputs
    differ, the interval is wider than the test. Where a graph computes in another order, every sample may
    differ in the last digit of a float, all in one direction: significant, but not relevant. Differences
    caused by random numbers are not counted either.
    """
    if difference.is_random or not round(difference.difference, MAX_DIGITS):
        return False
    low, high = difference.ci95 or (difference.difference, difference.difference)
    return is_significant_p_value(difference.p_value) and (low > 0 or high < 0)


SIGNIFICANCE_LEGEND = "* p < 0.05 and an interval without zero"
"""What the asterisk after a difference means."""


def is_significant_p_value(p_value: float) -> bool:
    """Return whether a p-value is significant at 5 %."""
    return p_value < SIGNIFICANCE_LEVEL


def number_text(value: float | None, digits: int = 2) -> str:
    """Return `value` with fixed digits and thousands separators."""
    if value is None:
        return MISSING_TEXT
    text = f"{value:,.{digits}f}"
    return text.replace("-", MINUS) if float(text.replace(",", "")) else text.lstrip("-")


def signed_text(value: float | None, digits: int = 2) -> str:
    """Return `value` with its sign; a zero has none."""
    text = number_text(value, digits)
    return f"+{text}" if value is not None and value > 0 and text.strip("0.") else text


def difference_digits(difference: ScoreDifference, metric: str | None) -> int:
    """Return the number of digits of a difference: more where a significant one would be shown as zero.

    The same holds for an end of its interval, which would then seem to contain zero.
    """
    digits = metric_digits(metric)
    values = [value for value in (difference.difference, *(difference.ci95 or ())) if value]
    while (
        is_significant(difference)
        and digits < MAX_DIGITS
        and not all(round(value, digits) for value in values)
    ):
        digits += 1
    return digits


def difference_text(difference: ScoreDifference | None, metric: str | None) -> str:
    """Return a difference with its sign."""
    if difference is None:
        return MISSING_TEXT
    return signed_text(difference.difference, difference_digits(difference, metric))


def difference_and_interval_text(difference: ScoreDifference | None, metric: str | None) -> str:
    """Return a difference with its mark and its 95 % interval, as `−1.37* [−1.72, −1.02]`."""
    if difference is None:
        return MISSING_TEXT
    mark = "*" * is_significant(difference)
    text = f"{difference_text(difference, metric)}{mark} {difference_interval_text(difference, metric)}"
    return text.rstrip()


def difference_interval_text(difference: ScoreDifference, metric: str | None) -> str:
    """Return the 95 % interval of a difference, or an empty text."""
    return interval_text(difference.ci95, difference_digits(difference, metric))


def interval_text(pair: tuple[float, float] | None, digits: int = 2) -> str:
    """Return `[low, high]`, or an empty text."""
    return "" if pair is None else f"[{number_text(pair[0], digits)}, {number_text(pair[1], digits)}]"


def significant_digits(value: float | None, digits: int = 3) -> str:
    """Return `value` to three significant digits, with all digits before the point: 1.23, 12.3, 1,234."""
    if value is None:
        return MISSING_TEXT
    integer_digits = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    return number_text(value, max(0, digits - integer_digits))


def megabytes(size_bytes: int | None) -> str:
    """Return bytes as megabytes of 10^6, or as `8.35 kB` where these would have too few digits."""
    if size_bytes is None:
        return MISSING_TEXT
    return (
        size_text(size_bytes) if 0 < size_bytes < _MIN_BYTES_IN_MB else significant_digits(size_bytes / 1e6)
    )


def size_text(*sizes: float) -> str:
    """Return sizes in bytes with one unit, that of the smallest: `4.40 MB`, `11.3 → 4.40 MB`, `8.35 kB`."""
    unit, factor = ("kB", 1e3) if min(sizes) < _MIN_BYTES_IN_MB else ("MB", 1e6)
    return f"{' → '.join(significant_digits(size / factor) for size in sizes)} {unit}"


def p_value_text(p_value: float) -> str:
    """Return `p = 0.012`, or `p < 0.001` where three digits would show zero.

    It has more digits where three would round a significant value up to the limit: `p = 0.0498`.
    """
    if p_value < 0.001:
        return "p < 0.001"
    digits = 3
    while is_significant_p_value(p_value) != is_significant_p_value(round(p_value, digits)):
        digits += 1
    return f"p = {p_value:.{digits}f}"


def gate_quantity_text(metric: str, value: float | None) -> str:
    """Return the value or limit of a gate on `metric`."""
    if metric == "size_bytes" and value is not None:
        return size_text(value)
    if metric == "operations" and value is not None:
        return f"{significant_digits(value / 1e6)} M"
    return number_text(value, metric_digits(metric))


def millions(count: int | None) -> str:
    """Return a count in millions."""
    return MISSING_TEXT if count is None else significant_digits(count / 1e6)


def has_quantized_weights(report: ReportData) -> bool:
    """Return whether any step has quantized weights."""
    return any("bits_per_weight" in step.details for step in report.steps)


OPERATIONS_LEGEND = (
    "Multiply-adds: of one forward pass for an input of the data's mean length (half of torch's flop count);"
    " quantized layers count as the float layers."
)


def has_operations(report: ReportData) -> bool:
    """Return whether the operations of any step are known."""
    return any(step.operations for step in report.steps)


def bits_per_weight_text(step: StepReport, report: ReportData) -> str:
    """Return the bits per quantized weight, with scales and zero points, inherited by the following steps."""
    steps = {other.name: other for other in report.steps}
    ancestor: StepReport | None = step
    while ancestor is not None and "bits_per_weight" not in ancestor.details:
        ancestor = steps.get(ancestor.parent or "")
    return MISSING_TEXT if ancestor is None else _value_text(ancestor.details["bits_per_weight"])


def size_ratio(step: StepReport, base: StepReport | None) -> float | None:
    """Return the step's size over the baseline's."""
    if base is None or not base.size_bytes or step.size_bytes is None:
        return None
    return step.size_bytes / base.size_bytes


def size_ratio_text(step: StepReport, base: StepReport | None) -> str:
    """Return `153 %`, with the type of the step's unquantized weights where the baseline's differs."""
    dtype = differing_dtype(step, base)
    return size_percent_text(step, base) + (f", unquantized weights in {dtype}" if dtype else "")


def size_percent_text(step: StepReport, base: StepReport | None) -> str:
    """Return the step's size over the baseline's as `153 %`; empty where one is not known."""
    ratio = size_ratio(step, base)
    return "" if ratio is None else f"{100 * ratio:.0f} %"


def differing_dtype(step: StepReport, base: StepReport | None) -> str | None:
    """Return the type of the step's unquantized weights if sizes are compared and the baseline's differs."""
    if base is None or size_ratio(step, base) is None or base.float_dtype in (None, step.float_dtype):
        return None
    return step.float_dtype


# of stages and scores that truncate texts
_TRUNCATED_CODE = "truncated-texts"


def sort_warnings(warnings: Iterable[Message]) -> list[Message]:
    """Return warnings with those about truncated texts last, since the others matter more."""
    return sorted(warnings, key=lambda message: message.code == _TRUNCATED_CODE)


def report_notes(report: ReportData) -> list[tuple[str, str, str]]:
    """Return (step, kind, text) of all errors, reasons, gates without a value, and warnings.

    Notes of the whole run come first, under the step name `run`.
    """
    entries: list[tuple[str, str, str]] = [
        ("run", message.severity, str(message)) for message in report.warnings
    ]
    entries += [("run", "disturbed", text) for text in disturbed_texts(report)]
    for step in report.steps:
        notes = (
            ("error", step.error and step.error.message),
            ("not scored" if step.unscored else step.status, step.reason),
        )
        entries += [(step.name, kind, text) for kind, text in notes if text]
        entries += [
            (step.name, gate_verdict(gate), f"gate {gate_text(gate)}: {gate.reason}")
            for gate in step.gates
            if gate.reason and (gate.passed is None or gate.reason not in step.failure_texts)
        ]
        entries += [
            (step.name, "warning", too_few_examples_text(gate, step))
            for gate in step.gates
            if gate.n_needed is not None
        ]
        info_texts = [measured_elsewhere_text(step), *detail_notes(step.details)]
        entries += [(step.name, "info", text) for text in info_texts if text]
        entries += [(step.name, warning.severity, str(warning)) for warning in sort_warnings(step.warnings)]
        if step.from_previous_run:
            entries.append((step.name, "kept", "from an earlier run in this folder; not part of this run"))
    return entries


GATE_VERDICTS = ("failed", "not judged", "within the limit, the 95 % interval is not", "passed")
"""The results of a gate as texts, the worst first."""


def gate_verdict(gate: GateReport) -> str:
    """Return the result of a gate, one of `GATE_VERDICTS`."""
    failed, not_judged, within_limit, passed = GATE_VERDICTS
    if gate.passed is None:
        return not_judged
    if not gate.passed:
        return failed
    return within_limit if gate.undecided else passed


def final_gates(step: StepReport) -> list[GateReport]:
    """Return the gates of a step, those on metrics as judged on test where the step was scored there."""
    on_test = {(gate.metric, gate.kind): gate for gate in (step.test.gates if step.test else ())}
    return [on_test.get((gate.metric, gate.kind), gate) for gate in step.gates]


def gate_rows(report: ReportData) -> list[tuple[StepReport, str, GateReport]]:
    """Return (step, split, gate) of all gates; a gate that was also judged on test has a row for each.

    Sizes and speeds are of no split.
    """
    return [
        (row.step, split if gate.metric in row.step.quality else MISSING_TEXT, gate)
        for row in tree_rows(report)
        for split, gates in (
            (report.judged_on, row.step.gates),
            ("test", row.step.test.gates if row.step.test else ()),
        )
        for gate in gates
    ]


def gate_text(gate: GateReport) -> str:
    """Return the limit of a gate as `BLEU at most 1.00 worse`, `size at most 6.00 MB`."""
    return f"{metric_label(gate.metric)} {_limit_text(gate)}"


def _limit_text(gate: GateReport) -> str:
    confidence_text = "" if gate.confidence is None else f" at confidence {gate.confidence:g}"
    limit = gate_quantity_text(gate.metric, gate.limit)
    bound = "at least" if gate.kind == "min" else "at most"
    return f"{bound} {limit}{' worse' * (gate.kind == 'max_degradation')}{confidence_text}"


def gate_result_text(gate: GateReport) -> str:
    """Return a gate with its value as `BLEU 1.37 worse (at most 1.00 worse)`."""
    return f"{metric_label(gate.metric)} {gate_value_text(gate)} ({_limit_text(gate)})"


def too_few_examples_text(gate: GateReport, step: StepReport) -> str:
    """Return that n is too small to decide `gate`, and how large it would have to be."""
    score, difference = step.quality.get(gate.metric), step.against_baseline.get(gate.metric)
    n = f"n = {count_text(score.n, sample_unit(gate.metric))}" if score else "n"
    low, high = (difference and difference.ci95) or (0.0, 0.0)
    digits = metric_digits(gate.metric)
    return (
        f"gate {gate_text(gate)}: {n} is too small to decide it; the difference is known to"
        f" ±{number_text((high - low) / 2, digits)}. Use about {_round_up(gate.n_needed or 0):,}."
    )


def _round_up(count: int) -> int:
    """Return `count` rounded up to two digits: more would suggest a false precision."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step


def gate_value_text(gate: GateReport) -> str:
    """Return the judged value, and the bound where the gate has a confidence; of a drop `1.37 worse`."""
    value = _gate_value(gate, gate.value)
    return value if gate.bound is None else f"{value}, bound {_gate_value(gate, gate.bound)}"


def _gate_value(gate: GateReport, value: float | None) -> str:
    if gate.kind != "max_degradation" or value is None:
        return gate_quantity_text(gate.metric, value)
    return f"{gate_quantity_text(gate.metric, abs(value))} {'better' if value < 0 else 'worse'}"
