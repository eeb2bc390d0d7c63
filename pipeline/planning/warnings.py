"""What a person should know of a run's data and settings before believing its numbers.

Said by the plan as far as model and data are at hand then, by the run for the rest, and by the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.data import CLASSIFICATION, CUSTOM, IMAGES, TEXT_TO_TEXT, Example, Split, Task
from smelt.core.files import load_json
from smelt.core.labels import MULTI, SINGLE, decide_problem, spelled_alike
from smelt.core.messages import Message, warning
from smelt.core.text import article
from smelt.evaluate.metrics import WINDOW_METRICS

if TYPE_CHECKING:
    from smelt.planning.plan import Step
    from smelt.recipe.recipe import Recipe

# Below this an interval is so wide that most steps cannot be told apart: +-10 points of accuracy.
FEWEST_ROWS = 100
# Shorter rows of running text are empty lines and headings, which any two texts share.
_LEAST_CHARACTERS = 80
_NAMED = 3


def data_warnings(recipe: Recipe, trains: bool, splits: Mapping[str, Split]) -> list[Message]:
    """Return what is doubtful about the rows that were read.

    Args:
        recipe: the recipe.
        trains: a step learns from the training rows.
        splits: as far as they were read, before `--limit` cuts them.
    """
    found: list[Message] = []
    test = splits.get("test")
    if test is not None:
        # of running text the rows say nothing of how much there is
        if recipe.task != "language-modeling" and len(test) < FEWEST_ROWS:
            found.append(
                warning(
                    "few-test-rows",
                    f"test has {_rows(len(test))}; below {FEWEST_ROWS} the intervals are too wide to compare"
                    " most steps.",
                )
            )
        for name in ("train", "validation") if trains else ():
            if name in splits:
                found += _copies(test, splits[name], name, recipe.task)
        calibrated = next((name for name in _calibrating(recipe.task) if name in splits), None)
        if calibrated is not None:
            found += _calibrated_on(test, splits[calibrated], calibrated, recipe.task)
    if recipe.task in CLASSIFICATION:
        found += _spellings(splits)
    for name, split in splits.items() if recipe.task not in (IMAGES, CUSTOM, "language-modeling") else ():
        found += _swallowed(split, name)
    return found


def kept_last(recipe: Recipe, steps: Iterable[Step]) -> list[Message]:
    """Return that trainings have no rows to choose their weights by."""
    names = [step.name for step in steps if hasattr(step.settings, "metric_for_best_model")]
    if not names or "validation" in recipe.data.splits():
        return []
    keep = "keep their" if len(names) > 1 else "keeps its"
    return [
        warning(
            "no-validation-data",
            f"There is no validation data: {', '.join(names)} {keep} last weights, which may not be the best."
            f" Add data: validation, or data: {{split: {{validation: 0.1}}}}.",
        )
    ]


def _swallowed(split: Split, name: str) -> list[Message]:
    """Name the rows whose text holds a line end and a tab: most likely several rows in one pair of quotes."""
    rows = [
        e.line or e.row or at + 1
        for at, e in enumerate(split.examples)
        if any("\n" in text and "\t" in text for text in (e.text, e.text_pair or "", *e.references))
    ]
    if not rows or not split.origin.removesuffix(".gz").endswith((".tsv", ".csv")):
        return []
    return [
        warning(
            "unclosed-quote",
            f"{_rows(len(rows))} with a line break and a tab in a text: an unclosed quote may join several"
            " rows. Double the quotes inside texts, or remove them.",
            file=split.origin,
            line=rows[0],
        )
    ]


def few_windows(statistics: Mapping[str, Mapping[str, Any]], split: str) -> list[Message]:
    """Return that a text has few windows, from which intervals and tests draw.

    Args:
        statistics: of a step, by metric.
        split: the name of what was scored.
    """
    counts = {len(found["rows"]) for metric, found in statistics.items() if metric in WINDOW_METRICS}
    return [
        warning(
            "few-windows",
            f"{split} has {many} window{'s' * (many > 1)}; below {FEWEST_ROWS} the intervals are too wide to"
            " compare most steps. Add text, or use shorter windows (data: windows: length).",
        )
        for many in counts
        if many < FEWEST_ROWS
    ]


def _copies(test: Split, other: Split, name: str, task: Task) -> list[Message]:
    """Compare the rows of `test` with those of the split `name`, on which something is decided."""
    seen: dict[tuple[str, str | None], set[object]] = {}
    for example, text in zip(other.examples, other.contents, strict=True):
        seen.setdefault((text, example.text_pair), set()).update(_answers(example))
    rows = [
        (e, text)
        for e, text in zip(test.examples, test.contents, strict=True)
        if task != "language-modeling" or len(text) >= _LEAST_CHARACTERS
    ]
    known = [(e, text) for e, text in rows if (text, e.text_pair) in seen]
    copies = [e for e, text in known if seen[text, e.text_pair] & _answers(e)]
    if not known:
        return []
    long = f" of {_LEAST_CHARACTERS} characters or more" if task == "language-modeling" else ""
    alike, one = ("byte for byte", "image") if task == IMAGES else ("word for word", "text")
    text = f"{len(copies):,} of {len(rows):,} test rows{long} are also in {name}, {alike}"
    if len(known) > len(copies):
        what, more = "target" if task in TEXT_TO_TEXT else "label", len(known) - len(copies)
        unlike = f"have {article(one)} of {name} with another {what}"
        text = (
            f"{text}; {more:,} more {unlike}"
            if copies
            else f"{more:,} of {len(rows):,} test rows{long} {unlike}"
        )
    why = "the model is trained on" if name == "train" else "chose the checkpoint"
    code = "test-rows-in-other-split" if copies else "test-texts-in-other-split"
    return [warning(code, f"{text}. Scores on {one}s that {why} overestimate those on new ones.")]


def _calibrating(task: Task) -> tuple[str, ...]:
    """Return the splits of which the first that is there calibrates; texts that train are told of above."""
    return ("calibration", "validation", "train") if task == CUSTOM else ("calibration",)


def _calibrated_on(test: Split, other: Split, name: str, task: Task) -> list[Message]:
    """Compare the rows of `test` with those that calibrate, whatever is to be answered to them."""
    known = {(text, e.text_pair) for e, text in zip(other.examples, other.contents, strict=True)}
    rows = [
        (text, e.text_pair)
        for e, text in zip(test.examples, test.contents, strict=True)
        if task != "language-modeling" or len(text) >= _LEAST_CHARACTERS
    ]
    copies = sum(row in known for row in rows)
    if not copies:
        return []
    return [
        warning(
            "test-rows-in-other-split",
            f"{copies:,} of {len(rows):,} test rows are also in {name}, which is used for calibration. Scores"
            " on them overestimate those on new rows. Use other rows for one of the two.",
        )
    ]


def _answers(example: Example) -> set[object]:
    """Return what is to be answered to the text: any of its references, or its label."""
    label = example.label
    return set(example.references) or {
        "|".join(sorted(map(str, label))) if isinstance(label, tuple) else label
    }


def _spellings(splits: Mapping[str, Split]) -> list[Message]:
    """Name the labels that only case or blanks tell apart."""
    labels = [e.label for split in splits.values() for e in split.examples if e.label is not None]
    if decide_problem(None, labels) not in (SINGLE, MULTI):
        return []
    groups = spelled_alike(labels)
    found = [
        warning(
            "labels-spelled-alike",
            f"Labels that differ only in case or blanks are different classes: {_counted(group)}. Write them"
            " alike.",
        )
        for group in groups[:_NAMED]
    ]
    more = len(groups) - _NAMED
    if more > 0:
        found.append(
            warning("labels-spelled-alike", f"{more:,} more groups of labels differ only in case or blanks.")
        )
    return found


def _counted(group: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r} ({_rows(rows)})" for name, rows in group.items())


def _rows(number: int) -> str:
    return f"{number:,} row{'' if number == 1 else 's'}"


def decoding_warnings(recipe: Recipe, folder: Path) -> list[Message]:
    """Compare how the model in `folder` asks to generate with how it is scored.

    What the recipe says of `num_beams` and `do_sample`, be it their defaults, is meant.
    """
    generation = recipe.score.generation
    if recipe.task not in TEXT_TO_TEXT:
        return []
    own = _generation_config(folder)
    beams, sampled = own.get("num_beams"), own.get("do_sample")
    said = generation.model_fields_set
    if (
        isinstance(beams, int)
        and beams > 1
        and beams != generation.num_beams
        and not said & {"num_beams", "do_sample"}
    ):
        return [
            warning(
                "generation-config-differs",
                f"The model's generation config asks for {beams} beams, but greedy search is scored and"
                f" timed. Set score: {{generation: {{num_beams: {beams}}}}}, or num_beams: 1 to confirm.",
                setting="score.generation.num_beams",
            )
        ]
    if sampled is True and not said & {"num_beams", "do_sample"}:
        return [
            warning(
                "generation-config-differs",
                "The model's generation config asks for sampling, but greedy search is scored and timed. Set"
                " score: {generation: {do_sample: true}}, or do_sample: false to confirm.",
                setting="score.generation.do_sample",
            )
        ]
    return []


def _generation_config(folder: Path) -> dict[str, Any]:
    """Return generation_config.json, else config.json, as transformers does; nothing of a broken file."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            try:
                value = load_json(folder / name)
            except (OSError, ValueError, RecursionError):
                return {}
            return value if isinstance(value, dict) else {}
    return {}
