"""Warnings about a run's data and settings that limit what its scores mean, and about orders of its steps.

The plan shows them as far as model and data are available, the run the rest, and the report all of them.
Orders of steps are reported that work but give poor results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.files import load_json
from smelt.core.messages import Message, warning, with_article, with_count
from smelt.data.labels import MULTI_LABEL, SINGLE_LABEL, infer_problem_type, similar_labels, split_labels
from smelt.data.splits import Example, Split
from smelt.data.tags import OUTSIDE
from smelt.data.tasks import Task, task_traits
from smelt.evaluate.metrics.registry import WINDOW_METRICS, scores_agreement_alone
from smelt.pipeline.plan.step_draft import StepDraft, lost_results, quantization_schemes, step_spec
from smelt.training.processes import external_processes

if TYPE_CHECKING:
    from smelt.pipeline.plan.plan import PlanStep
    from smelt.pipeline.recipe.recipe import ParsedRecipe


# With fewer samples, intervals are too wide to compare most steps: +-10 points of accuracy.
MIN_JUDGING_ROWS = 100
# Shorter lines of running text are empty lines and headings, which any two texts share.
_MIN_CHARACTERS = 80
_MAX_NAMED = 3


def data_warnings(recipe: ParsedRecipe, trains: bool, splits: Mapping[str, Split]) -> list[Message]:
    """Return warnings about the data: few test samples, overlap of splits, label spelling, quotes.

    Args:
        recipe: the recipe.
        trains: whether a step trains on the training samples.
        splits: the splits that were read, before `--limit` is applied.
    """
    messages: list[Message] = []
    test = splits.get("test")
    if test is not None:
        # for running text the number of lines is not the amount of text
        if recipe.traits.samples != "running-text" and len(test) < MIN_JUDGING_ROWS:
            messages.append(
                warning(
                    "few-test-rows",
                    f"test has only {_rows_text(len(test))}; with fewer than {MIN_JUDGING_ROWS} the"
                    " confidence intervals are too wide to compare most steps. Add test samples.",
                )
            )
        for name in ("train", "validation") if trains else ():
            if name in splits:
                messages += _overlap_warnings(test, splits[name], name, recipe.task)
        calibrated = next((name for name in _calibration_splits(recipe.task) if name in splits), None)
        if calibrated is not None:
            messages += _calibration_overlap_warnings(test, splits[calibrated], calibrated, recipe.task)
    if recipe.traits.classifies:
        messages += _label_spelling_warnings(splits)
        messages += _untrained_class_warnings(splits) if trains else []
    if recipe.traits.output == "tags":
        messages += _outside_tag_warnings(splits)
    for name, split in splits.items() if recipe.traits.samples in ("texts", "prompts") else ():
        messages += _unbalanced_quote_warnings(split, name)
    return messages


def last_checkpoint_warnings(recipe: ParsedRecipe, steps: Iterable[PlanStep]) -> list[Message]:
    """Return a warning if there is no validation data to choose the best checkpoint by."""
    names = [step.name for step in steps if hasattr(step.settings, "metric_for_best_model")]
    if not names or "validation" in recipe.data.split_sources():
        return []
    keep = "keep their" if len(names) > 1 else "keeps its"
    return [
        warning(
            "no-validation-data",
            f"No validation data: {', '.join(names)} {keep} last checkpoint, which may not be the best."
            f" Set data: validation, or data: {{split: {{validation: 0.1}}}}.",
        )
    ]


def launch_warnings(recipe: ParsedRecipe) -> list[Message]:
    """Return a warning if the strategy of several processes has only one, which nothing else starts."""
    launch = recipe.launch
    if launch.strategy == "ddp" or launch.num_processes > 1 or external_processes():
        return []
    return [
        warning(
            "one-process",
            f"launch: strategy: {launch.strategy} divides nothing with one process, so {launch.strategy} is"
            " not used. Set num_processes.",
            setting="launch.num_processes",
        )
    ]


def agreement_warnings(recipe: ParsedRecipe) -> list[Message]:
    """Return what scores without references cannot tell, if agreement of texts or classes is the only one."""
    is_supported = recipe.traits.output in ("text", "labels")
    if not is_supported or not scores_agreement_alone(recipe.score.quality):
        return []
    return [
        warning(
            "agreement-only",
            f"Only agreement with the outputs of '{recipe.baseline}' is scored. It shows how much a step"
            " changes the outputs, not whether they are right: correcting an error lowers it too. Score"
            " samples with references or labels before deploying.",
            setting="score.quality",
        )
    ]


def _unbalanced_quote_warnings(split: Split, name: str) -> list[Message]:
    """Return a warning if texts contain a line break and a tab, which an unclosed quote may cause."""
    if not split.origin.removesuffix(".gz").endswith((".tsv", ".csv")):
        return []
    numbers = [
        e.line or e.row or index + 1
        for index, e in enumerate(split.examples)
        if any("\n" in text and "\t" in text for text in (e.text, e.text_pair or "", *e.references))
    ]
    if not numbers:
        return []
    return [
        warning(
            "unclosed-quote",
            f"{_rows_text(len(numbers))} with a line break and a tab in a text: an unclosed quote may have"
            " joined several samples. Double the quotes inside texts, or remove them.",
            file=split.origin,
            line=numbers[0],
        )
    ]


def few_windows_warnings(statistics: Mapping[str, Mapping[str, Any]], split: str) -> list[Message]:
    """Return a warning if a text has few windows, which are the units of intervals and tests.

    Args:
        statistics: statistics of a step, by metric.
        split: name of the scored split.
    """
    counts = {
        len(metric_statistics["rows"])
        for metric, metric_statistics in statistics.items()
        if metric in WINDOW_METRICS
    }
    return [
        warning(
            "few-windows",
            f"{split} has only {many} window{'s' * (many > 1)}; with fewer than {MIN_JUDGING_ROWS} the"
            " confidence intervals are too wide to compare most steps. Add text, or use shorter windows"
            " (data: windows: length).",
        )
        for many in counts
        if many < MIN_JUDGING_ROWS
    ]


def _overlap_warnings(test: Split, other: Split, name: str, task: Task) -> list[Message]:
    """Return a warning if samples of `test` are also in the split `name`, used for training or selection."""
    outputs_by_text: dict[tuple[str, str | None], set[object]] = {}
    for example, text in zip(other.examples, other.row_contents, strict=True):
        outputs_by_text.setdefault((text, example.text_pair), set()).update(_expected_outputs(example))
    samples = [
        (e, text)
        for e, text in zip(test.examples, test.row_contents, strict=True)
        if task_traits(task).samples != "running-text" or len(text) >= _MIN_CHARACTERS
    ]
    shared_samples = [(e, text) for e, text in samples if (text, e.text_pair) in outputs_by_text]
    copies = [e for e, text in shared_samples if outputs_by_text[text, e.text_pair] & _expected_outputs(e)]
    if not shared_samples:
        return []
    length_text = (
        f" of {_MIN_CHARACTERS} characters or more" if task_traits(task).samples == "running-text" else ""
    )
    match_text, noun = {
        "image": ("byte for byte", "image"),
        "image-and-text": ("byte for byte", "image"),
        "audio": ("byte for byte", "file"),
    }.get(task_traits(task).modality, ("word for word", "text"))
    text = f"{len(copies):,} of {len(samples):,} test samples{length_text} are also in {name}, {match_text}"
    if len(shared_samples) > len(copies):
        output_name, num_different = (
            "target" if task_traits(task).output == "text" else "label",
            len(shared_samples) - len(copies),
        )
        difference_text = f"have {with_article(noun)} of {name} with another {output_name}"
        text = (
            f"{text}; {num_different:,} more {difference_text}"
            if copies
            else f"{num_different:,} of {len(samples):,} test samples{length_text} {difference_text}"
        )
    usage = "used for training" if name == "train" else "used to choose the checkpoint"
    code = "test-rows-in-other-split" if copies else "test-texts-in-other-split"
    fix = "Remove them from one of the two."
    return [warning(code, f"{text}. Scores on {noun}s {usage} overestimate quality on new ones. {fix}")]


def _calibration_splits(task: Task) -> tuple[str, ...]:
    """Return the candidate splits for calibration, best first; `_overlap_warnings` covers training texts."""
    return (
        ("calibration", "validation", "train") if task_traits(task).modality == "arrays" else ("calibration",)
    )


def _calibration_overlap_warnings(test: Split, other: Split, name: str, task: Task) -> list[Message]:
    """Return a warning if samples of `test` are also used for calibration, whatever their labels are."""
    calibration_samples = {
        (text, e.text_pair) for e, text in zip(other.examples, other.row_contents, strict=True)
    }
    samples = [
        (text, e.text_pair)
        for e, text in zip(test.examples, test.row_contents, strict=True)
        if task_traits(task).samples != "running-text" or len(text) >= _MIN_CHARACTERS
    ]
    copies = sum(sample in calibration_samples for sample in samples)
    if not copies:
        return []
    return [
        warning(
            "test-rows-in-other-split",
            f"{copies:,} of {len(samples):,} test samples are also in {name}, which is used for calibration."
            " Scores on them overestimate quality on new samples. Remove them from one of the two.",
        )
    ]


def _expected_outputs(example: Example) -> set[object]:
    """Return the expected outputs of a sample: its references, or its label."""
    label = example.label
    return set(example.references) or {
        "|".join(sorted(map(str, label))) if isinstance(label, tuple) else label
    }


def _label_spelling_warnings(splits: Mapping[str, Split]) -> list[Message]:
    """Return warnings about labels that differ only in case or blanks."""
    labels = [e.label for split in splits.values() for e in split.examples if e.label is not None]
    if infer_problem_type(None, labels) not in (SINGLE_LABEL, MULTI_LABEL):
        return []
    groups = similar_labels(labels)
    messages = [
        warning(
            "labels-spelled-alike",
            f"Labels that differ only in case or spaces are different classes: {_counts_text(group)}. Use one"
            " spelling for each class.",
        )
        for group in groups[:_MAX_NAMED]
    ]
    num_hidden = len(groups) - _MAX_NAMED
    if num_hidden > 0:
        messages.append(
            warning(
                "labels-spelled-alike", f"{num_hidden:,} more groups of labels differ only in case or spaces."
            )
        )
    return messages


def _untrained_class_warnings(splits: Mapping[str, Split]) -> list[Message]:
    """Return a warning for each split with classes that no training sample has.

    None for a split without any class of the training samples: its labels are written in another way.
    """
    if "train" not in splits:
        return []
    names = {
        name: {
            str(label)
            for e in split.examples
            if isinstance(e.label, str | int)
            for label in split_labels(e.label)
        }
        for name, split in splits.items()
    }
    missing = {
        name: sorted(names[name] - names["train"])
        for name in ("validation", "test")
        if not names["train"].isdisjoint(names.get(name, ()))
    }
    return [
        warning(
            "class-not-in-train",
            f"{name} has {with_count(len(classes), 'label')} that no training sample has"
            f" ({', '.join(map(repr, classes[:_MAX_NAMED]))}{', ...' if len(classes) > _MAX_NAMED else ''}),"
            " which training cannot teach. Add training samples of each class.",
        )
        for name, classes in missing.items()
        if classes
    ]


def _outside_tag_warnings(splits: Mapping[str, Split]) -> list[Message]:
    """Return a warning if no tag is `O`, but one differs from it only in case or blanks."""
    labels = (e.label for split in splits.values() for e in split.examples if isinstance(e.label, tuple))
    tags = {tag for label in labels for tag in label}
    similar = [tag for tag in tags if str(tag).strip().casefold() == OUTSIDE.casefold()]
    if OUTSIDE in tags or not similar:
        return []
    return [
        warning(
            "no-outside-tag",
            f"No tag is {OUTSIDE!r}, but one is {sorted(map(str, similar))[0]!r}: it is read as a type of"
            f" entity. Write {OUTSIDE} for words without entity.",
        )
    ]


def _counts_text(group: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r} ({_rows_text(count)})" for name, count in group.items())


def _rows_text(number: int) -> str:
    return f"{number:,} sample{'' if number == 1 else 's'}"


def decoding_warnings(recipe: ParsedRecipe, folder: Path) -> list[Message]:
    """Return a warning if the model's generation config differs from the recipe's generation settings.

    No warning if the recipe sets `num_beams` or `do_sample` explicitly, even to the default.
    """
    generation = recipe.score.generation
    if recipe.traits.output != "text":
        return []
    model_config = _generation_config(folder)
    beams, sampled = model_config.get("num_beams"), model_config.get("do_sample")
    explicit = generation.model_fields_set
    if (
        isinstance(beams, int)
        and beams > 1
        and beams != generation.num_beams
        and not explicit & {"num_beams", "do_sample"}
    ):
        return [
            warning(
                "generation-config-differs",
                f"The model's generation config uses {beams} beams, but scores and latency are measured with"
                f" greedy search. Set score: {{generation: {{num_beams: {beams}}}}}, or num_beams: 1 to"
                " confirm.",
                setting="score.generation.num_beams",
            )
        ]
    if sampled is True and not explicit & {"num_beams", "do_sample"}:
        return [
            warning(
                "generation-config-differs",
                "The model's generation config uses sampling, but scores and latency are measured with greedy"
                " search. Set score: {generation: {do_sample: true}}, or do_sample: false to confirm.",
                setting="score.generation.do_sample",
            )
        ]
    return []


def _generation_config(folder: Path) -> dict[str, Any]:
    """Return generation_config.json, else config.json, as transformers does; empty for a broken file."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            try:
                value = load_json(folder / name)
            except (OSError, ValueError, RecursionError):
                return {}
            return value if isinstance(value, dict) else {}
    return {}


def poor_order_warnings(draft: StepDraft, above: Sequence[StepDraft]) -> Iterator[Message]:
    """Yield warnings about a step after the steps `above`, nearest first."""
    location: Any = {"step": draft.name, "line": draft.entry.line}
    if draft.stage_class is not None and draft.settings is not None:
        earlier = {d.entry.stage: d.settings for d in reversed(above) if d.settings is not None}
        reason = draft.stage_class.poor_order(draft.settings, earlier)
        if reason is not None:
            yield warning("poor-order", reason, **location)
        if draft.settings.replaces_model:
            yield from _unused_work_warnings(draft, above)
    for d in above if draft.entry.stage == "onnx" else ():
        if d.stage_class is not None and d.stage_class.trains_weights:
            break
        schemes = quantization_schemes(d) if d.entry.stage == "quantize" else None
        if untrained := " and ".join(scheme.name for scheme in schemes or () if scheme.requires_training):
            yield warning(
                "untrained-scheme",
                f"The {untrained} weights of '{d.name}' are exported without training, so quality will be"
                f" low. Add distill after '{d.name}' to train the quantized weights.",
                **location,
            )


def _unused_work_warnings(draft: StepDraft, above: Sequence[StepDraft]) -> Iterator[Message]:
    """Yield a warning if the work of earlier steps is lost because the student is another model.

    Steps up to the nearest teacher count.
    """
    teachers = set(draft.references.values())
    previous_drafts = list(itertools.takewhile(lambda d: d.name not in teachers, above))
    idle = [
        f"'{d.name}'" for d in reversed(previous_drafts) if d.stage_class and d.stage_class.changes_weights
    ]
    if idle:
        yield warning(
            "unused-steps",
            f"The student is another model, so the work of {' and '.join(idle)} is lost. Set `from: model`,"
            " or use one of these steps as the teacher.",
            step=draft.name,
            line=draft.entry.line,
        )


def lost_work_warnings(drafts: Mapping[str, StepDraft]) -> Iterator[Message]:
    """Yield a warning where a step invalidates the result of an earlier one (see `lost_results`).

    drafts: steps by name, in the recipe's order.
    """
    ancestors_by_name: dict[str, list[StepDraft]] = {}  # the ancestors of each step, nearest first
    for name, draft in drafts.items():
        parent = drafts.get(draft.parent or "")
        ancestors_by_name[name] = [parent, *ancestors_by_name[parent.name]] if parent else []
    for name, draft in drafts.items():
        if (step := step_spec(draft)) is None:
            continue
        ancestors = [spec for d in ancestors_by_name[name] if (spec := step_spec(d))]
        descendants = [
            spec
            for other_name, line in ancestors_by_name.items()
            if draft in line and (spec := step_spec(drafts[other_name]))
        ]
        for code, text in lost_results(step, ancestors, descendants):
            yield warning(code, text, step=draft.name, line=draft.entry.line)
