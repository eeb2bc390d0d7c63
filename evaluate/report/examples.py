"""The examples that a step changed: the rows whose score differs most from the baseline's, and confusions.

`compare_examples` selects them when a step is scored; the pages mark the words that differ.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.messages import count_text
from smelt.data.bleu_tokenizer import UNSPACED_PATTERN
from smelt.data.labels import multi_label_targets, split_labels
from smelt.data.prompt_rows import parse_conversation
from smelt.data.splits import Example, Split
from smelt.data.tags import OUTSIDE, word_lists
from smelt.evaluate.metrics.classes import ClassMetric
from smelt.evaluate.metrics.registry import METRICS, find_metric
from smelt.evaluate.report import view
from smelt.evaluate.report.schema import ReportData, StepReport
from smelt.evaluate.report.step_schema import ChangedExample, Confusion

# Characters of a text in the report; longer ones are cut.
MAX_CHARACTERS = 400
_CONTEXT = 80  # characters before the first difference of cut outputs
_MAX_REFERENCES = 3
# Classes of a confusion matrix; with more only the largest confusions are kept.
MAX_MATRIX_LABELS = 15
_MAX_CONFUSIONS = 15


def compare_examples(
    score: Mapping[str, Any], baseline: Mapping[str, Any] | None, split: Split, limit: int
) -> dict[str, Any]:
    """Return `examples` and `confusion` of a step in report.json.

    The examples are ordered by the difference of the first metric that has a value on a single example; equal
    differences by row. Half of `limit` are for the worse, unless there are fewer.

    Args:
        score: a result of scoring a step: `statistics` and `predictions`; for classifiers `labels`.
        baseline: likewise of the baseline; None for the baseline itself, or if it is not scored yet.
        split: the scored examples.
        limit: how many examples; 0 for none.
    """
    labels = score.get("labels")
    confusion_entry = None if labels is None else _confusion(score, baseline, labels)
    return {
        "confusion": confusion_entry,
        "examples": baseline and _changed_examples(score, baseline, split, limit),
    }


def _changed_examples(
    score: Mapping[str, Any], baseline: Mapping[str, Any], split: Split, limit: int
) -> dict[str, Any] | None:
    step_outputs, base = score.get("predictions") or [], baseline.get("predictions") or []
    if not limit or len(step_outputs) != len(base) or len(step_outputs) != len(split):
        return None
    value_pairs = _value_pairs(score["statistics"], baseline["statistics"], len(step_outputs))
    if value_pairs is None:
        return None
    metric, values = value_pairs
    sign = 1 if find_metric(metric).higher_is_better else -1
    gains = sign * (values[0] - values[1])
    order = sorted(range(len(gains)), key=lambda index: float(gains[index]))
    worse_indices = [index for index in order if gains[index] < 0]
    better_indices = sorted(
        (index for index in order if gains[index] > 0), key=lambda index: -float(gains[index])
    )
    num_worse_shown = max(limit - limit // 2, limit - len(better_indices))
    indices_by_kind = {
        "worse": worse_indices[:num_worse_shown],
        "better": better_indices[: limit - len(worse_indices[:num_worse_shown])],
    }
    labels = score.get("labels")

    def describe(index: int) -> dict[str, Any]:
        example = split.examples[index]
        tags = {"output": step_outputs[index], "baseline_output": base[index]}
        is_tagged = labels is None and all(map(_are_names, tags.values()))
        return {
            **_example_texts(example, labels, split.images),
            **{name: _output_text(output) for name, output in tags.items()},
            **(_tagged_texts(example, tags) if is_tagged else {}),
            "value": float(values[0][index]),
            "baseline_value": float(values[1][index]),
        }

    entries = {
        kind: [
            ChangedExample(
                row=split.examples[index].row or index + 1, **_cut_texts(describe(index))
            ).model_dump()
            for index in rows
        ]
        for kind, rows in indices_by_kind.items()
    }
    return {
        "metric": find_metric(metric).example_metric or metric,
        "n": len(step_outputs),
        "num_worse": len(worse_indices),
        "num_better": len(better_indices),
        **entries,
    }


def _value_pairs(
    step_statistics: Mapping[str, Any], base: Mapping[str, Any], n: int
) -> tuple[str, tuple[Any, Any]] | None:
    """Return the first metric with a value on single examples, and its values of step and baseline, [n]."""
    from smelt.evaluate.significance import Statistics, example_values

    for metric in step_statistics:
        pair = [Statistics.model_validate(side[metric]) for side in (step_statistics, base) if metric in side]
        if len(pair) < 2 or any(len(paired_statistics.rows) != n for paired_statistics in pair):
            continue
        first, second = map(example_values, pair)
        if first is not None and second is not None:
            return metric, (first, second)
    return None


def _example_texts(example: Example, labels: Sequence[str] | None, images: bool) -> dict[str, Any]:
    """Return source, second text and references of an example, whole."""
    turns = parse_conversation(example.text)
    source = example.text
    if images:
        source = Path(example.text).name
    elif turns is not None:
        source = "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    references = list(example.references[:_MAX_REFERENCES])
    if example.label is not None:
        references = [_label_text(example, labels or ())]
    return {"source": source, "text_pair": example.text_pair, "references": references}


def _are_names(output: Any) -> bool:
    return isinstance(output, list) and all(isinstance(item, str) for item in output)


def _tagged_texts(example: Example, outputs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return outputs and references of a sample whose words have tags, each tag at its word."""
    [words] = word_lists([example])
    texts: dict[str, Any] = {name: _tagged_text(words, tags) for name, tags in outputs.items()}
    if isinstance(example.label, tuple) and all(isinstance(tag, str) for tag in example.label):
        texts["references"] = [_tagged_text(words, [str(tag) for tag in example.label])]
    return texts


def _tagged_text(words: Sequence[str], tags: Sequence[str]) -> str:
    """Return `EU/B-ORG rejects German/B-MISC call`."""
    pairs = zip(words, tags, strict=True)
    return " ".join(token if tag == OUTSIDE else f"{token}/{tag}" for token, tag in pairs)


def _label_text(example: Example, labels: Sequence[str]) -> str:
    """Return the names of an example's labels; the label as written where it is not a class."""
    try:
        [label_indices] = multi_label_targets([example], labels)
    except InputError:
        return ", ".join(map(str, split_labels(example.label)))
    return ", ".join(labels[label_index] for label_index in label_indices)


def _output_text(output: Any) -> str:
    """Return a text, the name of a class, names of classes, a number or numbers as text."""
    if isinstance(output, float):
        return f"{output:.4g}"
    return output if isinstance(output, str) else ", ".join(map(_output_text, output))


def _cut_texts(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example with long texts cut; outputs from shortly before their first difference."""
    step_output, base = str(entry["output"]), str(entry["baseline_output"])
    start = 0
    if max(len(step_output), len(base)) > MAX_CHARACTERS:
        min_length = min(len(step_output), len(base))
        common_length = next(
            (index for index in range(min_length) if step_output[index] != base[index]), min_length
        )
        start = max(0, min(common_length - _CONTEXT, max(len(step_output), len(base)) - MAX_CHARACTERS))
        start = (
            (step_output.find(" ", start, common_length) + 1 or start) if start else 0
        )  # a whole word, if spaces part them
    full_texts = {
        "source": entry["source"],
        "text_pair": entry["text_pair"],
        "references": entry["references"],
        "output": step_output,
        "baseline_output": base,
    }
    cut_texts = {
        "source": _cut(entry["source"]),
        "text_pair": entry["text_pair"] and _cut(entry["text_pair"]),
        "references": [_cut(text) for text in entry["references"]],
        "output": _cut(step_output, start),
        "baseline_output": _cut(base, start),
    }
    return {**entry, **cut_texts, "cut": cut_texts != full_texts}


def _cut(text: str, start: int = 0) -> str:
    part = text[start : start + MAX_CHARACTERS]
    return ("…" if start else "") + part + ("…" if start + MAX_CHARACTERS < len(text) else "")


def _confusion(
    score: Mapping[str, Any], baseline: Mapping[str, Any] | None, labels: Sequence[str]
) -> dict[str, Any] | None:
    """Return `confusion` of a step; None unless each example has one label."""
    counts = _count_predictions(score, len(labels))
    if counts is None:
        return None
    base = None if baseline is None else _count_predictions(baseline, len(labels))
    if len(labels) <= MAX_MATRIX_LABELS:
        return Confusion(labels=list(labels), counts=counts.tolist()).model_dump()
    wrong = counts.copy()
    wrong[range(len(labels)), range(len(labels))] = 0
    largest = sorted(zip(*wrong.nonzero(), strict=True), key=lambda index: -wrong[index])[:_MAX_CONFUSIONS]
    return {
        "labels": [],
        "counts": [],
        "largest": [
            {
                "label": labels[gold],
                "predicted": labels[predicted],
                "count": int(counts[gold, predicted]),
                "baseline_count": None if base is None else int(base[gold, predicted]),
            }
            for gold, predicted in largest
        ],
    }


def _count_predictions(score: Mapping[str, Any], labels: int) -> Any:
    """Return int64 [label, predicted class], the number of examples; None unless each has one label."""
    import numpy as np

    statistics = score["statistics"]
    class_rows = (
        metric_statistics["rows"]
        for name, metric_statistics in statistics.items()
        if isinstance(find_metric(name), ClassMetric)
    )
    rows = next(class_rows, None)
    if rows is None:
        return None
    counts = np.zeros((labels, labels), dtype=np.int64)
    for predicted, gold, *_ in rows:
        counts[int(gold), int(predicted)] += 1
    return counts


_PUNCTUATION = re.escape("""!"#$%&()*+,./:;<=>?@[\\]^`{|}~…–—„“”«»‹›¡¿。、，！？；：（）「」『』【】،؛؟।""")
_TOKEN = re.compile(
    rf"\s+|{UNSPACED_PATTERN}|[{_PUNCTUATION}]|(?:(?!{UNSPACED_PATTERN})[^\s{_PUNCTUATION}])+"
)
Marked = Sequence[tuple[bool, str]]  # whether a part differs, and its text


@lru_cache(maxsize=1024)  # a run renders its report after every step
def mark_differences(one: str, other: str) -> tuple[Marked, Marked]:
    """Return the parts of two texts in their order, each with whether the other text lacks it.

    Texts are compared by word (difflib), in scripts without spaces between words by character. The parts of
    each side joined are the text.
    """
    a, b = _TOKEN.findall(one), _TOKEN.findall(other)
    first: list[tuple[bool, str]] = []
    second: list[tuple[bool, str]] = []
    for kind, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for parts, tokens in ((first, a[a0:a1]), (second, b[b0:b1])):
            if tokens:
                parts.append((kind != "equal", "".join(tokens)))
    return _join_marks(first), _join_marks(second)


def _join_marks(parts: Marked) -> Marked:
    """Return the parts, with a space or one letter between two differences as a part of them."""
    merged: list[tuple[bool, str]] = []
    for part_index, (is_changed, text) in enumerate(parts):
        differs = is_changed or (0 < part_index < len(parts) - 1 and len(text) == 1)
        if merged and merged[-1][0] == differs:
            merged[-1] = (differs, merged[-1][1] + text)
        else:
            merged.append((differs, text))
    return merged


_AGREEMENT_NOTE = (
    "How much the outputs changed, not whether they are right: a corrected error lowers the agreement too."
)
# Hides the examples that lack a word of the search field; without scripts the field is not shown.
SEARCH_SCRIPT = """
const field = document.getElementById("example-search"), count = document.getElementById("example-count");
const cards = [...document.querySelectorAll("article.example")];
const plain = text => text.normalize("NFC").toLocaleLowerCase();
field.parentElement.hidden = false;
field.addEventListener("input", () => {
  const words = plain(field.value).split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const card of cards) {
    const text = plain(card.textContent);
    card.hidden = !words.every(word => text.includes(word));
    shown += !card.hidden;
  }
  for (const step of document.querySelectorAll("details.examples")) {
    const found = step.querySelector("article.example:not([hidden])") !== null;
    step.hidden = words.length > 0 && !found;
    if (words.length && found) step.open = true;
  }
  count.textContent = words.length ? `${shown} of ${cards.length} examples` : "";
});
"""


def script_source_hash() -> str:
    """Return the hash of the page's only script, as a Content-Security-Policy allows it."""
    digest = hashlib.sha256(SEARCH_SCRIPT.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def steps_with_examples(report: ReportData) -> list[StepReport]:
    """Return the steps with examples that changed, or with a confusion matrix."""
    return [
        row.step
        for row in view.tree_rows(report)
        if row.step.confusion
        or (row.step.examples and (row.step.examples.num_worse or row.step.examples.num_better))
    ]


def steps_by_examples(report: ReportData) -> list[list[StepReport]]:
    """Return the steps with examples, those with the same examples and confusions together.

    The first step of the first group is the verdict's.
    """
    groups: list[list[StepReport]] = []
    for step in steps_with_examples(report):
        same = next((g for g in groups if _shown(g[0]) == _shown(step)), None)
        if same is None:
            groups.append([step])
        else:
            same.append(step)
    first = step_shown_first(report)
    ordered = [sorted(group, key=lambda step: step is not first) for group in groups]
    return sorted(ordered, key=lambda group: group[0] is not first)


def _shown(step: StepReport) -> tuple[Any, Any]:
    """Return what the page shows of a step's examples."""
    return step.examples, step.confusion


def has_changed_examples(report: ReportData) -> bool:
    """Return whether the page shows an example, so that there is something to search."""
    return any(step.examples and (step.examples.worse or step.examples.better) for step in report.steps)


def step_shown_first(report: ReportData) -> StepReport | None:
    """Return the step whose examples are open in the page: the verdict's, else the first with examples."""
    candidates = steps_with_examples(report)
    verdict_names = (report.verdict.step, report.verdict.closest) if report.verdict else ()
    ranked = [step for name in verdict_names for step in candidates if step.name == name]
    return next(iter([*ranked, *(step for step in candidates if step.examples), *candidates]), None)


def agreement_columns(report: ReportData) -> list[tuple[str, str]]:
    """Return (field, title) of the values of `Agreement` that a step of the report has."""
    agreements = [step.agreement for step in report.steps if step.agreement]
    per_token = " per token" if any(agreement.bleu is not None for agreement in agreements) else ""
    titles = {
        "equal": "Same output, %",
        "bleu": "BLEU",
        "chrf": "chrF",
        "kl_divergence": f"KL divergence, nats{per_token}",
    }
    return [
        (name, title)
        for name, title in titles.items()
        if any(getattr(agreement, name) is not None for agreement in agreements)
    ]


def agreement_notes(report: ReportData) -> list[str]:
    """Return what the agreement means, and why a KL divergence is missing."""
    kl_reasons = [(step.name, step.agreement.kl_reason) for step in report.steps if step.agreement]
    return [
        _AGREEMENT_NOTE,
        *(f"No KL divergence of {name}: {reason}." for name, reason in kl_reasons if reason),
    ]


def agreement_text(step: StepReport, name: str) -> str:
    """Return a value of a step's agreement as text."""
    value = None if step.agreement is None else getattr(step.agreement, name)
    if name == "kl_divergence" and value is not None:
        return f"{value:.2e}" if 0 < value < 0.001 else view.number_text(value, 4)
    return view.number_text(value)


def counts_text(step: StepReport) -> str:
    """Return `12 worse, 5 better of 1,000 examples`."""
    examples = step.examples
    if examples is None:
        return ""
    return (
        f"{examples.num_worse:,} worse, {examples.num_better:,} better of {count_text(examples.n, 'example')}"
    )


def change_text(metric: str, example: ChangedExample) -> str:
    """Return the metric before and after, `BLEU 61.20 → 23.10`; of a single class `right → wrong`."""
    pair = example.baseline_value, example.value
    if metric in METRICS and METRICS[metric].kind == "proportion":
        return " → ".join("right" if value else "wrong" for value in pair)
    return f"{view.metric_label(metric)} {' → '.join(view.number_text(value) for value in pair)}"


def confusion_rows(
    step: StepReport, baseline: StepReport | None
) -> list[tuple[str, list[tuple[int, int | None]]]]:
    """Return the rows of a confusion matrix: the label, then (count, difference from the baseline's)."""
    step_confusion = step.confusion
    if step_confusion is None:
        return []
    base = baseline.confusion if baseline and baseline is not step else None
    same_labels = base is not None and base.labels == step_confusion.labels
    return [
        (
            label,
            [
                (count, count - base.counts[label_index][predicted_index] if base and same_labels else None)
                for predicted_index, count in enumerate(step_confusion.counts[label_index])
            ],
        )
        for label_index, label in enumerate(step_confusion.labels)
    ]


def largest_confusions(step: StepReport, limit: int) -> list[tuple[str, str, int]]:
    """Return the most frequent wrong predictions of a step: label, predicted class, count."""
    confusion = step.confusion
    if confusion is None:
        return []
    pairs = [(entry.label, entry.predicted, entry.count) for entry in confusion.largest]
    pairs += [
        (label, confusion.labels[predicted_index], count)
        for label_index, label in enumerate(confusion.labels)
        for predicted_index, count in enumerate(confusion.counts[label_index])
        if predicted_index != label_index and count
    ]
    return sorted(pairs, key=lambda pair: -pair[2])[:limit]
