"""What a recipe says: its keys, their types and defaults, and reading them from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from smelt.core.data import TASKS, Columns, Task
from smelt.core.errors import InputError, nearest
from smelt.core.stage import Settings
from smelt.core.windows import Windows
from smelt.evaluate.latency import LatencySettings
from smelt.problem import LABEL_METRICS
from smelt.recipe_errors import Mistakes, check, shown
from smelt.recipe_overrides import apply_overrides
from smelt.recipe_stages import StageEntry, read_stages, step_names
from smelt.recipe_yaml import Document, Where, parse_yaml, read_yaml
from smelt.runtime.device import Device
from smelt.runtime.generation import Generation

LATER_TASKS = ("image-classification", "sentence-similarity")
METRICS: dict[str, tuple[str, ...]] = {
    "translation": ("bleu", "chrf", "rouge1", "rouge2", "rougeL"),
    "summarization": ("rouge1", "rouge2", "rougeL", "bleu", "chrf"),
    "language-modeling": ("perplexity", "bits_per_byte"),
    "text-classification": LABEL_METRICS,
}
# What is scored where a recipe names no metrics: all that fit the task, except here. Of a classifier
# the problem type decides, which is known when model and data are (smelt.plan_labels).
DEFAULT_METRICS = METRICS | {"summarization": ("rouge1", "rouge2", "rougeL"), "text-classification": ()}
# Of these less is better, so that `max_drop` limits a rise, and the other limit is `max`.
LOWER_IS_BETTER = frozenset({"perplexity", "bits_per_byte", "mse"})

# Stages that train all weights: a model without any needs one before it can be a baseline.
TRAINING_STAGES = ("finetune", "distill")


class NewTokenizer(Settings):
    """A tokenizer that is to be trained on the texts of the training rows."""

    train: Literal["bpe", "unigram", "wordpiece"]
    vocab_size: int = Field(default=8000, ge=1, le=1_000_000)


class Untrained(Settings):
    """A model that is to be started from its config, without weights.

    config: a folder with config.json, or a .json file. tokenizer: a folder, a hub id, or how to train one.
    """

    config: str
    tokenizer: str | NewTokenizer


class Data(Settings):
    """Where the rows of each split are: a file, relative to the recipe, or a hub id.

    prefix, source_language, target_language: what is put before each source text, and the languages of a
    multilingual model; None takes what the model says (see `smelt.text_rules`). windows: how the text of
    a language model is cut.
    """

    train: str | None = None
    validation: str | None = None
    calibration: str | None = None
    test: str
    columns: Columns = Columns()
    windows: Windows = Windows()
    prefix: str | None = None
    source_language: str | None = None
    target_language: str | None = None

    def splits(self) -> dict[str, str]:
        """Return the splits that are given, by name."""
        names = ("train", "validation", "calibration", "test")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class ScoreSettings(Settings):
    """What is measured after every step. `latency` is None where the recipe says `false`."""

    quality: tuple[str, ...] = ()
    generation: Generation = Generation()
    latency: LatencySettings | Literal[False] | None = LatencySettings()
    batch_size: int = Field(default=32, ge=1, le=4096)

    @field_validator("latency")
    @classmethod
    def _off(cls, value: LatencySettings | bool | None) -> LatencySettings | None:
        return value if isinstance(value, LatencySettings) else None


class Gate(Settings):
    """A limit that the steps `at` (default: the last of each branch) must keep.

    confidence: of the interval whose worse end must keep it; None judges the value itself.
    """

    max_drop: float | None = Field(default=None, ge=0)
    min: float | None = None
    max: float | None = None
    confidence: float | None = Field(default=None, ge=0.5, le=0.999)
    at: str | tuple[str, ...] | None = None


class RecipeKeys(Settings):
    """The keys of a recipe besides `stages`, as they stand in the file."""

    model: str | Untrained
    task: Task
    data: Data
    score: ScoreSettings = ScoreSettings()
    baseline: str = "model"
    gates: dict[str, Gate] = Field(default_factory=dict)
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    strict: bool = False
    threads: int | None = Field(default=None, ge=1, le=1024)
    device: Device = "auto"


class Recipe(RecipeKeys):
    """A recipe that was read.

    stages: the steps as they were written. path: the file. document: the file's content as plain
    values, `--set` applied, as report.json shows it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    stages: tuple[StageEntry, ...] = ()
    path: Path
    document: dict[str, Any] = Field(default_factory=dict)

    @property
    def base(self) -> Path:
        """The folder that paths in the recipe are relative to."""
        return self.path.parent


# What stands in for a part that is wrong, so that the rest can be checked in the same go.
_PLACEHOLDERS: dict[str, Any] = {"model": "", "task": TASKS[0], "data": {"test": ""}}
_KEYS = (*RecipeKeys.model_fields, "stages")


def find_recipe(word: str) -> Path:
    """Return the file that `word` means: a path, or the name of a recipe that ships with smelt.

    Raises:
        InputError: neither; the message names the nearest file.
    """
    import smelt.configs

    path = Path(word).expanduser()
    if path.is_file():
        return path
    shipped = {p.stem: p for p in Path(str(smelt.configs.__file__)).parent.glob("*.yaml")}
    if word in shipped:
        return shipped[word]
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    names = ", ".join(sorted(shipped)) or "none"
    hint = nearest(path.name, [*beside, *shipped])
    raise InputError(f"{word}: no such recipe: there is no such file, and smelt ships: {names}.{hint}")


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at `path` with the `--set` texts `overrides`.

    Raises:
        InputError: every mistake that the text shows, one per line.
    """
    recipe, mistakes, _ = examine(read_yaml(path), path, overrides)
    mistakes.raise_all()
    return recipe


def parse_recipe(text: str, path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from `text`, as if it stood at `path`.

    Raises:
        InputError: every mistake that the text shows, one per line.
    """
    recipe, mistakes, _ = examine(parse_yaml(text, str(path)), path, overrides)
    mistakes.raise_all()
    return recipe


def examine(document: Document, path: Path, overrides: Sequence[str]) -> tuple[Recipe, Mistakes, set[str]]:
    """Check what the text of a recipe shows.

    Returns:
        The recipe, with placeholders for what is wrong; the mistakes; the top-level keys that are
        wrong and of which nothing more should be said.
    """
    if not isinstance(document.value, dict):
        read = "an empty file" if document.value is None else shown(document.value)
        raise InputError(
            f"{document.name}:1: expected a recipe with the keys model, task, data and stages, read {read}."
        )
    mistakes = Mistakes(document)
    value: dict[str, Any] = document.value
    apply_overrides(value, overrides, mistakes, _KEYS)
    head = {key: part for key, part in value.items() if key in RecipeKeys.model_fields}
    for key in value:
        if key not in _KEYS:
            mistakes.add((key,), f"unknown key. Known: {', '.join(_KEYS)}.{nearest(key, _KEYS)}")
    task_bad = _check_task(head, mistakes)
    keys, bad = check(RecipeKeys, head | task_bad, (), mistakes)
    bad |= set(task_bad)
    if keys is None:
        bad |= {key for key in _PLACEHOLDERS if key not in head}
        rest = {key: part for key, part in head.items() if key not in bad}
        keys = RecipeKeys.model_validate_json(json.dumps(_PLACEHOLDERS | rest), strict=True)
    if keys.task != "language-modeling" and not bad & {"task", "data"} and keys.data.windows != Windows():
        mistakes.add(("data", "windows"), f"is for language-modeling; {keys.task} has rows of its own.")
    keys = _check_quality(keys, bad, mistakes)
    _check_gates(keys, bad, mistakes)
    entries, stages_bad = read_stages(value.get("stages"), mistakes)
    if stages_bad:
        bad.add("stages")
    if isinstance(keys.model, Untrained) and "baseline" not in head:
        names = zip(entries, step_names(entries), strict=True)
        trained = next((name for entry, name in names if entry.word in TRAINING_STAGES), keys.baseline)
        keys = keys.model_copy(update={"baseline": trained})
    parts = {name: getattr(keys, name) for name in RecipeKeys.model_fields}
    recipe = Recipe(**parts, stages=tuple(entries), path=path, document=value)
    return recipe, mistakes, bad


def _check_task(head: dict[str, Any], mistakes: Mistakes) -> dict[str, Any]:
    """Return what is to stand in for a task that this version does not know; nothing for one it does."""
    task = head.get("task")
    if not isinstance(task, str) or task in TASKS:
        return {}
    known = ", ".join(TASKS)
    if task in LATER_TASKS:
        mistakes.add(("task",), f"'{task}' is not yet supported by this version. Supported: {known}.")
    else:
        hint = nearest(task, (*TASKS, *LATER_TASKS))
        mistakes.add(("task",), f"unknown task {shown(task)}. Supported: {known}.{hint}")
    return {"task": TASKS[0]}


def _check_quality(keys: RecipeKeys, bad: set[str], mistakes: Mistakes) -> RecipeKeys:
    """Check that the metrics fit the task, and fill in the task's own where none is named."""
    if bad & {"task", "score"}:
        return keys
    fitting = METRICS[keys.task]
    if not keys.score.quality:
        score = keys.score.model_copy(update={"quality": DEFAULT_METRICS[keys.task]})
        return keys.model_copy(update={"score": score})
    everything = {metric: task for task, metrics in METRICS.items() for metric in metrics}
    for number, metric in enumerate(keys.score.quality):
        path: Where = ("score", "quality", number)
        known = f"Known for {keys.task}: {', '.join(fitting)}."
        if metric in keys.score.quality[:number]:
            mistakes.add(path, f"'{metric}' is named twice.")
        elif metric not in fitting:
            bad.add("score")
            what = "belongs to " + everything[metric] if metric in everything else "is no metric"
            mistakes.add(path, f"{shown(metric)} {what}. {known}{nearest(metric, fitting)}")
    return keys


def _check_gates(keys: RecipeKeys, bad: set[str], mistakes: Mistakes) -> None:
    """Check that each gate is on something that is measured, and has the limits that fit it."""
    if bad & {"gates", "score", "task"}:
        return
    measured = keys.score.quality or METRICS[keys.task]
    limits: dict[str, tuple[str, ...]] = dict.fromkeys(measured, ("max_drop", "min"))
    limits |= {metric: ("max_drop", "max") for metric in limits if metric in LOWER_IS_BETTER}
    limits |= {"speedup": ("min",), "size_bytes": ("max",)}
    for metric, gate in keys.gates.items():
        path: Where = ("gates", metric)
        if metric not in limits:
            unmeasured = metric in METRICS[keys.task]
            what = "is not measured; add it to score.quality" if unmeasured else "is nothing that has a gate"
            mistakes.add(
                path, f"'{metric[:60]}' {what}. Known: {', '.join(limits)}.{nearest(metric, limits)}"
            )
            continue
        if metric == "speedup" and not keys.score.latency:
            mistakes.add(path, "there is no speedup without latency; remove `latency: false` or this gate.")
        _check_limits(metric, gate, limits[metric], path, mistakes)


def _check_limits(metric: str, gate: Gate, fitting: Sequence[str], path: Where, mistakes: Mistakes) -> None:
    given = [name for name in ("max_drop", "min", "max") if getattr(gate, name) is not None]
    for name in given:
        if name not in fitting:
            mistakes.add((*path, name), f"does not fit '{metric}', which takes {' or '.join(fitting)}.")
    if gate.confidence is not None and metric == "size_bytes":
        mistakes.add((*path, "confidence"), "a size is exact: there is no interval to judge; leave it out.")
    if not given:
        mistakes.add(path, f"no limit; give {' or '.join(fitting)}, for example {{{fitting[0]}: 1.0}}.")
