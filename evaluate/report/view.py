"""What the three drawings of a report (terminal, Markdown, HTML) share: order, names, numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smelt.core.data import CUSTOM, IMAGES
from smelt.evaluate.metrics import METRICS, WINDOW_METRICS
from smelt.evaluate.report.schema import (
    ClassifierParts,
    Difference,
    GenerationParts,
    Latency,
    Report,
    Step,
)

MISSING = "–"
MINUS = "−"
DOUBT = "?"  # behind a speed-up whose times were disturbed
SIGNIFICANT = 0.05
_MOST_DIGITS = 6
_TITLES = {name: metric.title for name, metric in METRICS.items()}
_TITLES |= {"size_bytes": "size", "speedup": "speed-up", "cpu_speedup": "speed-up by CPU time"}

# digits after the point, where two would hide what matters
_DIGITS = {"bits_per_byte": 4}


@dataclass(frozen=True)
class Row:
    """A step and the branches drawn before its name, for example `│  └─ `."""

    step: Step
    branch: str


def rows(report: Report) -> list[Row]:
    """Return the steps depth first. An only child keeps its parent's indent, branches are drawn."""
    children: dict[str | None, list[Step]] = {}
    for step in report.steps:
        children.setdefault(step.parent, []).append(step)
    ordered = []
    stack = _branches(children.get(None, []), "", root=True)
    while stack:
        step, own, below = stack.pop()
        ordered.append(Row(step, own))
        stack += _branches(children.get(step.name, []), below)
    return ordered


def _branches(steps: Sequence[Step], indent: str, root: bool = False) -> list[tuple[Step, str, str]]:
    """Return (step, text before it, text before what hangs on it), the last one first."""
    if root or len(steps) == 1:
        return [(step, indent, indent) for step in reversed(steps)]
    drawn = [(step, indent + "├─ ", indent + "│  ") for step in steps[:-1]]
    drawn += [(step, indent + "└─ ", indent + "   ") for step in steps[-1:]]
    return drawn[::-1]


def metrics(report: Report) -> list[str]:
    """Return the quality metrics of the report in their first order."""
    return list(dict.fromkeys(metric for step in report.steps for metric in step.quality))


def batch_sizes(report: Report) -> list[int]:
    """Return the batch sizes that were timed, smallest first."""
    return sorted({entry.batch_size for step in report.steps for entry in step.latency})


def label(metric: str) -> str:
    """Return the metric's name as papers write it."""
    return _TITLES.get(metric, metric)


def digits(metric: str | None) -> int:
    """Return how many digits after the point a value of `metric` is shown with."""
    return _DIGITS.get(metric or "", 2)


def title(report: Report) -> str:
    """Return the recipe's name; where the report does not say it, the model's."""
    return str(report.recipe.get("name") or model_name(report))


def model_name(report: Report) -> str:
    """Return the model of the recipe: a name, or the last part of a path."""
    model = report.recipe.get("model")
    if isinstance(model, Mapping):
        model = model.get("config")
    return str(model).rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1] if model else "model"


def hardware(report: Report) -> str:
    """Return what the environment says of processor and accelerator."""
    cpu, cores = report.environment.get("cpu"), report.environment.get("cores")
    found = [str(cpu)] if cpu else []
    found += [f"{cores} core{'' if cores == 1 else 's'}"] if cores else []
    gpus = report.environment.get("gpus") or []
    found += [str(gpu.get("name") if isinstance(gpu, Mapping) else gpu) for gpu in gpus]
    return ", ".join(found) or MISSING


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as (dotted name, text) pairs."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found += flatten(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", MISSING if value is None else _plain(value)))
    return found


def sample(report: Report) -> tuple[int, str] | None:
    """Return on how many of what the first metric was computed: examples, or tokens."""
    found = ((score.n, unit(metric)) for step in report.steps for metric, score in step.quality.items())
    return next(found, None)


def unit(metric: str) -> str:
    """Return of what a metric counts `n`."""
    return "token" if metric in WINDOW_METRICS else "example"


def sample_text(report: Report) -> str:
    """Return `n = 1,000 examples`; nothing where nothing was scored."""
    found = sample(report)
    of = "" if report.judged_on == "test" else f" of {report.judged_on}"
    return f"n = {counted(*found)}{of}" if found else ""


def counted(number: int, word: str) -> str:
    """Return `1 row`, `1,000 rows`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def signatures(report: Report) -> list[tuple[str, str]]:
    """Return (metric, signature), each pair once."""
    pairs = ((m, q.signature) for step in report.steps for m, q in step.quality.items())
    return list(dict.fromkeys(pairs))


def speed(row: Latency | None) -> str:
    """Return the speed-up as `5.94×`, `5.94×?` where it was disturbed."""
    if row is None or row.speedup is None:
        return MISSING
    return f"{number(row.speedup)}×{DOUBT if row.stable is False else ''}"


def median(row: Latency | None) -> str:
    """Return the p50 in ms as `14.2`, `14.2?` where it was disturbed."""
    if row is None:
        return MISSING
    return significant_digits(row.p50_ms) + (DOUBT if row.stable is False else "")


def cpu_speed(row: Latency) -> str:
    """Return the speed-up by processor time as `5.94×`."""
    return MISSING if row.cpu_speedup is None else f"{number(row.cpu_speedup)}×"


def doubt(rows: Iterable[Latency]) -> str:
    """Return why no speed is claimed from `rows`, each cause once."""
    causes: dict[str, list[Latency]] = {}
    for row in rows:
        if row.stable is False:
            causes.setdefault(row.cause or row.reason or "", []).append(row)
    return "; ".join(_cause(cause, rows) for cause, rows in causes.items())


def _cause(cause: str, rows: Sequence[Latency]) -> str:
    """Return one cause of doubt in words; of several rows, each with its figures, what holds for all."""
    lost = [one.lost_share for row in rows for one in row.rounds or []]
    if cause == "busy" and len(rows) > 1 and lost:
        return f"other work took the processor for up to {100 * max(lost):.0f} % of a round"
    if cause == "disagree" and len(rows) > 1:
        return "the rounds disagree"
    return rows[0].reason or cause


def parts(report: Report, found: GenerationParts | ClassifierParts) -> list[tuple[str, float | None]]:
    """Return (name, ms) of what a call goes into, in the order in which it happens."""
    if isinstance(found, ClassifierParts):
        before = "decoding" if report.recipe.get("task") == IMAGES else "tokenizing"
        return [(before, found.tokenizing_ms), ("model", found.model_ms), ("labels", found.rest_ms)]
    first = "prefill" if report.recipe.get("task") == "language-modeling" else "encoder"
    return [
        ("tokenizing", found.tokenizing_ms),
        (first, found.encoding_ms),
        ("to the first token", found.time_to_first_token_ms),
        ("per further token", found.time_per_output_token_ms),
        ("detokenizing", found.detokenizing_ms),
    ]


def way(report: Report) -> str:
    """Return from where to where times are."""
    ways: dict[str, str] = {IMAGES: "image file to label", CUSTOM: "arrays to arrays"}
    return ways.get(str(report.recipe.get("task")), "text to text")


def kind_of(step: Step) -> str:
    """Return where the step's artifact runs: format and target."""
    return " · ".join(part for part in (step.format, step.target) if part) or MISSING


def matters(difference: Difference) -> bool:
    """Tell whether the difference is significant at 5 %, and not zero in all digits that are shown.

    Where a graph computes in another order, every row may be off by the last digit of a float, all to one
    side: the test is right, and nobody would call it a difference. Nor is one that random numbers make.
    """
    if difference.drawn:
        return False
    return matters_at(difference.p_value) and bool(round(difference.difference, _MOST_DIGITS))


def matters_at(p_value: float) -> bool:
    """Tell whether that is significant at 5 %."""
    return p_value < SIGNIFICANT


def number(value: float | None, digits: int = 2) -> str:
    """Return `value` with fixed digits, thousands set apart."""
    if value is None:
        return MISSING
    text = f"{value:,.{digits}f}"
    return text.replace("-", MINUS) if float(text.replace(",", "")) else text.lstrip("-")


def signed(value: float | None, digits: int = 2) -> str:
    """Return `value` with its sign; a zero has none."""
    text = number(value, digits)
    return f"+{text}" if value is not None and value > 0 and text.strip("0.") else text


def digits_of_change(found: Difference, metric: str | None) -> int:
    """Return with how many digits a difference is shown: more where a significant one would be a zero.

    So would be an end of its interval, which then seems to hold a zero.
    """
    places = digits(metric)
    told = [value for value in (found.difference, *(found.ci95 or ())) if value]
    while matters(found) and places < _MOST_DIGITS and not all(round(value, places) for value in told):
        places += 1
    return places


def change(found: Difference | None, metric: str | None) -> str:
    """Return a difference with its sign."""
    if found is None:
        return MISSING
    return signed(found.difference, digits_of_change(found, metric))


def change_interval(found: Difference, metric: str | None) -> str:
    """Return the 95 % interval of a difference, or nothing."""
    return interval(found.ci95, digits_of_change(found, metric))


def interval(pair: tuple[float, float] | None, digits: int = 2) -> str:
    """Return `[low, high]`, or nothing."""
    return "" if pair is None else f"[{number(pair[0], digits)}, {number(pair[1], digits)}]"


def significant_digits(value: float | None, digits: int = 3) -> str:
    """Return `value` to three significant digits, but all digits before the point: 1.23, 12.3, 1,234."""
    if value is None:
        return MISSING
    before = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    return number(value, max(0, digits - before))


def megabytes(size_bytes: int | None) -> str:
    """Return bytes as megabytes of 10^6."""
    return MISSING if size_bytes is None else significant_digits(size_bytes / 1e6)


def probability(p_value: float) -> str:
    """Return `p = 0.012`, or `p < 0.001` where three digits would show nothing.

    More digits where three would round a significant value up to the limit: `p = 0.0498`.
    """
    if p_value < 0.001:
        return "p < 0.001"
    places = 3
    while matters_at(p_value) != matters_at(round(p_value, places)):
        places += 1
    return f"p = {p_value:.{places}f}"


def quantity(metric: str, value: float | None) -> str:
    """Return the value or limit of a gate on `metric`."""
    if metric == "size_bytes" and value is not None:
        return f"{significant_digits(value / 1e6)} MB"
    return number(value, digits(metric))


def millions(count: int | None) -> str:
    """Return a count in millions."""
    return MISSING if count is None else significant_digits(count / 1e6)


def coded(report: Report) -> bool:
    """Tell whether the weights of any step are codes."""
    return any("bits_per_weight" in step.details for step in report.steps)


def bits(step: Step, report: Report) -> str:
    """Return the bits of a coded weight, scales and zero points counted; codes stay codes in what follows."""
    steps = {other.name: other for other in report.steps}
    at: Step | None = step
    while at is not None and "bits_per_weight" not in at.details:
        at = steps.get(at.parent or "")
    return MISSING if at is None else _plain(at.details["bits_per_weight"])


def ratio_of_size(step: Step, base: Step | None) -> float | None:
    """Return the step's size over the baseline's."""
    if base is None or not base.size_bytes or step.size_bytes is None:
        return None
    return step.size_bytes / base.size_bytes


def ratio_text(step: Step, base: Step | None) -> str:
    """Return `153 %`, with the type of the step's floating-point weights where the baseline's is another."""
    dtype = other_dtype(step, base)
    return percent_of_size(step, base) + (f", floats in {dtype}" if dtype else "")


def percent_of_size(step: Step, base: Step | None) -> str:
    """Return the step's size over the baseline's as `153 %`; nothing where one is not known."""
    ratio = ratio_of_size(step, base)
    return "" if ratio is None else f"{100 * ratio:.0f} %"


def other_dtype(step: Step, base: Step | None) -> str | None:
    """Return the type of the step's floating-point weights where sizes compare and the baseline's differs."""
    if base is None or ratio_of_size(step, base) is None or base.float_dtype in (None, step.float_dtype):
        return None
    return step.float_dtype
