"""What a recipe says: its keys, their types and defaults, and reading them from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, field_validator

from smelt.core.data import EVERY_TASK, IMAGES, SIMILARITY, Task
from smelt.core.errors import InputError, nearest
from smelt.core.scripts import TOKENIZERS
from smelt.core.stage import Settings
from smelt.core.windows import Windows
from smelt.evaluate.latency import LatencySettings
from smelt.evaluate.metrics import LOWER_IS_BETTER
from smelt.recipe.errors import Mistakes, check, dotted, shown, touches
from smelt.recipe.inputs import Data, Embedding, Untrained
from smelt.recipe.other_names import called
from smelt.recipe.overrides import apply_overrides
from smelt.recipe.problem import LABEL_METRICS, TENSOR_METRICS, VECTOR_METRICS
from smelt.recipe.stages import StageEntry, read_stages, step_names
from smelt.recipe.yaml_file import Document, Where, parse_yaml, read_yaml
from smelt.runtime.backends.device import Device
from smelt.runtime.generate.settings import Generation

METRICS: dict[str, tuple[str, ...]] = {
    "translation": ("bleu", "chrf", "rouge1", "rouge2", "rougeL"),
    "summarization": ("rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf"),
    "language-modeling": ("perplexity", "bits_per_byte"),
    IMAGES: LABEL_METRICS,
    "text-classification": LABEL_METRICS,
    "sentence-similarity": VECTOR_METRICS,
    "custom": TENSOR_METRICS,
}
# What is scored where a recipe names no metrics: all that fit the task, except here. Of a classifier
# the problem type decides, of vectors whether there are scores, which is known when model and data are
# (smelt.planning.labels, smelt.planning.sentences).
DEFAULT_METRICS = METRICS | {
    "summarization": ("rouge1", "rouge2", "rougeL", "rougeLsum"),
    "text-classification": (),
    IMAGES: (),
    "sentence-similarity": (),
}

# What a gate may ask of the times: by the clock, by processor time.
SPEEDS = ("speedup", "cpu_speedup")

# The rows that gates and the recommendation may be judged on.
JudgedOn = Literal["validation", "test"]

# Stages that train all weights: a model without any needs one before it can be a baseline.
TRAINING_STAGES = ("finetune", "distill")


class ScoreSettings(Settings):
    """What is measured after every step; `latency` is None where the recipe has `false`."""

    quality: tuple[str, ...] = Field(default=(), description="metrics; the first is the main one")
    generation: Generation = Field(default=Generation(), description="how texts are generated")
    latency: LatencySettings | Literal[False] | None = Field(
        default=LatencySettings(), description="false: not measured"
    )
    batch_size: int = Field(default=32, ge=1, le=4096, description="samples per call when scoring")

    @field_validator("latency")
    @classmethod
    def _off(cls, value: LatencySettings | bool | None) -> LatencySettings | None:
        return value if isinstance(value, LatencySettings) else None


class Gate(Settings):
    """A limit of a metric."""

    max_drop: float | None = Field(default=None, ge=0, description="largest loss against the baseline")
    min: float | None = Field(default=None, description="smallest value")
    max: float | None = Field(default=None, description="largest value")
    confidence: float | None = Field(
        default=None,
        ge=0.5,
        le=0.999,
        description="judge the worse end of this interval, not the value",
    )
    at: str | tuple[str, ...] | None = Field(
        default=None, description="steps to judge; default the last of each branch"
    )


class RecipeKeys(Settings):
    """The keys of a recipe other than `stages`, as in the file."""

    model: str | Untrained = Field(description="folder, hub id, .onnx file, or an untrained model")
    task: Task = Field(description="task of the model")
    tokenizer: str | None = Field(
        default=None, description=".onnx file: folder with config.json and tokenizer"
    )
    data: Data = Field(description="data of each split")
    embedding: Embedding = Field(
        default=Embedding(), description="sentence embedders: how texts become vectors"
    )
    score: ScoreSettings = Field(default=ScoreSettings(), description="what is measured after every step")
    baseline: str = Field(default="model", description="step that others are compared with")
    gates: dict[str, Gate] = Field(default_factory=dict, description="limits by metric")
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="of all random numbers")
    truncation: Literal["warn", "error"] = Field(
        default="warn",
        description="texts beyond the model's limit: truncate with a warning, or refuse",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="threads of torch; default all cores"
    )
    device: Device = Field(default="auto", description="where to train; auto: CUDA if available")


class Recipe(RecipeKeys):
    """A recipe that was read.

    stages: the steps as they were written. path: the file. tokenize: of BLEU, as its entry in score.quality
    says, None where the references decide. judged_on: the rows of gates and recommendation, as `gates.on`
    says, None where the plan decides. document: the file's content as plain values, `--set` applied, as
    report.json shows it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    stages: tuple[StageEntry, ...] = ()
    path: Path
    tokenize: str | None = None
    judged_on: JudgedOn | None = None
    document: dict[str, Any] = Field(default_factory=dict)

    @property
    def base(self) -> Path:
        """The folder that paths in the recipe are relative to."""
        return self.path.parent


# What stands in for a part that is wrong, so that the rest can be checked in the same go.
_STAND_INS: dict[str, Any] = {"model": "", "task": EVERY_TASK[0], "data": {}}
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
    if path.is_dir():
        model = (path / "config.json").is_file()
        hint = f" `smelt init {word}` writes one for the model in it." if model else ""
        raise InputError(
            f"{word}: a folder, and not a recipe, which is a YAML file.{hint}", code="not-a-recipe"
        )
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    names = ", ".join(sorted(shipped)) or "none"
    hint = nearest(path.name, [*beside, *shipped])
    raise InputError(
        f"{word}: no such recipe: there is no such file, and smelt ships: {names}.{hint}",
        code="unknown-recipe",
    )


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
        The recipe, with defaults and placeholders for what is wrong; the mistakes; where it is wrong, as
        dotted paths (a whole key such as `data`, or a part of it), of which nothing more should be said.
    """
    if not isinstance(document.value, dict):
        read = "an empty file" if document.value is None else shown(document.value)
        raise InputError(
            f"{document.name}:1: expected a recipe with the keys model, task, data and stages, read {read}.",
            code="not-a-recipe",
            file=document.name,
            line=1,
        )
    mistakes = Mistakes(document)
    value: dict[str, Any] = document.value
    apply_overrides(value, overrides, mistakes, _KEYS)
    head = {key: part for key, part in value.items() if key in RecipeKeys.model_fields}
    for key in value:
        if key not in _KEYS:
            mistakes.add(
                (key,),
                f"unknown key. Known: {', '.join(_KEYS)}.{called(key, _KEYS) or nearest(key, _KEYS)}",
                code="unknown-setting",
            )
    tokenize, judged_on = _take_metric_options(head, mistakes), _take_judged_on(head, mistakes)
    task_bad = _check_task(head, mistakes)
    keys, places = check(RecipeKeys, head | task_bad, (), mistakes, _STAND_INS)
    assert keys is not None  # each key has a default or a stand-in
    bad = {dotted(place) for place in places} | set(task_bad)
    _check_data(keys, bad, mistakes)
    keys = _check_quality(keys, bad, mistakes)
    _check_gates(keys, bad, mistakes)
    entries, stages_bad = read_stages(value.get("stages"), mistakes)
    if stages_bad:
        bad.add("stages")
    if isinstance(keys.model, Untrained) and "baseline" not in head:
        names = zip(entries, step_names(entries), strict=True)
        trained = next((name for entry, name in names if entry.word in TRAINING_STAGES), keys.baseline)
        keys = keys.model_copy(update={"baseline": trained})
    parts: dict[str, Any] = {name: getattr(keys, name) for name in RecipeKeys.model_fields}
    if judged_on == "validation" and "validation" not in keys.data.splits() and not touches(bad, "data"):
        mistakes.add(
            ("gates", "on"), "the recipe has no validation rows; give data: validation.", code="missing-data"
        )
    parts |= {"tokenize": tokenize, "judged_on": judged_on, "document": value}
    recipe = Recipe(**parts, stages=tuple(entries), path=path)
    return recipe, mistakes, bad


def _take_metric_options(head: dict[str, Any], mistakes: Mistakes) -> str | None:
    """Put the name in place of each metric with options; return how BLEU tokenizes, None where none says."""
    score = head.get("score")
    if not isinstance(score, dict) or not isinstance(score.get("quality"), list):
        return None
    names: list[Any] = []
    tokenize = None
    for number, entry in enumerate(score["quality"]):
        if not (isinstance(entry, dict) and len(entry) == 1 and isinstance(next(iter(entry)), str)):
            names.append(entry)
            continue
        [(name, options)] = entry.items()
        names.append(name)
        path: Where = ("score", "quality", number, name)
        if not isinstance(options, dict):
            mistakes.add(
                path,
                f"expected settings such as {{tokenize: zh}}, read {shown(options)}.",
                code="wrong-value",
            )
            continue
        for key, value in options.items():
            if key != "tokenize" or name != "bleu":
                known = "tokenize" if name == "bleu" else "none"
                mistakes.add(
                    (*path, key),
                    f"'{name[:60]}' has no such setting. Known: {known}.",
                    code="unknown-setting",
                )
            elif value not in TOKENIZERS:
                hint = nearest(str(value), TOKENIZERS)
                known = ", ".join(TOKENIZERS)
                mistakes.add(
                    (*path, key), f"expected one of {known}; read {shown(value)}.{hint}", code="wrong-value"
                )
            else:
                tokenize = str(value)
    head["score"] = score | {"quality": names}
    return tokenize


def _take_judged_on(head: dict[str, Any], mistakes: Mistakes) -> JudgedOn | None:
    """Take `on` from among the gates, whose names are those of metrics; None where it is not said."""
    gates = head.get("gates")
    if not isinstance(gates, dict) or "on" not in gates:
        return None
    head["gates"] = {name: gate for name, gate in gates.items() if name != "on"}
    for word in get_args(JudgedOn):
        if gates["on"] == word:
            return word  # type: ignore[no-any-return]
    mistakes.add(
        ("gates", "on"), f"expected validation or test, read {shown(gates['on'])}.", code="wrong-value"
    )
    return None


def _check_task(head: dict[str, Any], mistakes: Mistakes) -> dict[str, Any]:
    """Return what is to stand in for a task that this version does not know; nothing for one it does."""
    task = head.get("task")
    if not isinstance(task, str) or task in EVERY_TASK:
        return {}
    known = ", ".join(EVERY_TASK)
    hint = called(task, EVERY_TASK) or nearest(task, EVERY_TASK)
    mistakes.add(("task",), f"unknown task {shown(task)}. Supported: {known}.{hint}", code="unknown-task")
    return {"task": EVERY_TASK[0]}


def _check_data(keys: RecipeKeys, bad: set[str], mistakes: Mistakes) -> None:
    """Check that there is a test split, each split comes from one place, and windows are for text."""
    data = keys.data
    parts = data.split.given()
    for name in parts:
        if getattr(data, name) is not None:
            mistakes.add(
                ("data", "split", name),
                f"'{name}' has a file of its own. Remove one of the two.",
                code="settings-conflict",
            )
    if parts and data.train is None and not touches(bad, "data.train"):
        mistakes.add(
            ("data", "split"),
            "takes rows out of train, and there is no train: name a file.",
            code="missing-data",
        )
    elif "test" not in data.splits() and not touches(bad, "data.test", "data.split", "data.train"):
        beside = " (or beside train, `split: {test: 0.1}`)" if data.train is not None else ""
        mistakes.add(
            ("data", "test"), f"missing; expected a file or a hub id{beside}.", code="missing-setting"
        )
    wrong = keys.task != "language-modeling" and data.windows != Windows()
    if wrong and not touches(bad, "task", "data.windows"):
        mistakes.add(
            ("data", "windows"),
            f"is for language-modeling; {keys.task} has rows of its own.",
            code="does-not-fit-task",
        )
    if keys.task != SIMILARITY and keys.embedding != Embedding() and not touches(bad, "task", "embedding"):
        mistakes.add(
            ("embedding",),
            f"is for {SIMILARITY}; a model for {keys.task} makes no vectors.",
            code="does-not-fit-task",
        )


def _check_quality(keys: RecipeKeys, bad: set[str], mistakes: Mistakes) -> RecipeKeys:
    """Check that the metrics fit the task, and fill in the task's own where none is named."""
    if touches(bad, "task", "score.quality"):
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
            mistakes.add(path, f"'{metric}' is named twice.", code="duplicate-metric")
        elif metric not in fitting:
            bad.add("score.quality")
            elsewhere = metric in everything
            what = f"belongs to {everything[metric]}" if elsewhere else "is no metric"
            mistakes.add(
                path,
                f"{shown(metric)} {what}. {known}{nearest(metric, fitting)}",
                code="does-not-fit-task" if elsewhere else "unknown-metric",
            )
    return keys


def _check_gates(keys: RecipeKeys, bad: set[str], mistakes: Mistakes) -> None:
    """Check that each gate is on something that is measured, and has the limits that fit it."""
    if touches(bad, "task"):
        return
    every = METRICS[keys.task]
    measured = every if touches(bad, "score.quality") else keys.score.quality or every
    limits: dict[str, tuple[str, ...]] = dict.fromkeys(measured, ("max_drop", "min"))
    # of these less is better, so that `max_drop` limits a rise
    limits |= {metric: ("max_drop", "max") for metric in limits if metric in LOWER_IS_BETTER}
    limits |= {**dict.fromkeys(SPEEDS, ("min",)), "size_bytes": ("max",)}
    for metric, gate in keys.gates.items():
        path: Where = ("gates", metric)
        if metric not in limits:
            code, what = (
                ("metric-not-scored", "is not measured; add it to score.quality")
                if metric in every
                else ("unknown-metric", "is nothing that has a gate")
            )
            mistakes.add(
                path,
                f"'{metric[:60]}' {what}. Known: {', '.join(limits)}.{nearest(metric, limits)}",
                code=code,
            )
            continue
        # switched off for one run, the gate is not judged in it; the plan says so
        if metric in SPEEDS and not keys.score.latency and ("score", "latency") not in mistakes.overridden:
            mistakes.add(
                path,
                f"there is no {metric} without latency; remove `latency: false` or this gate.",
                code="settings-conflict",
            )
        _check_limits(metric, gate, limits[metric], path, mistakes, touches(bad, f"gates.{metric}"))


def _check_limits(
    metric: str, gate: Gate, fitting: Sequence[str], path: Where, mistakes: Mistakes, wrong: bool
) -> None:
    """Check the limits of one gate; `wrong`: something in it was left out, which may have been its limit."""
    given = [name for name in ("max_drop", "min", "max") if getattr(gate, name) is not None]
    for name in given:
        if name not in fitting:
            mistakes.add(
                (*path, name),
                f"does not fit '{metric}', which takes {' or '.join(fitting)}.",
                code="does-not-fit-metric",
            )
    if gate.confidence is not None and metric == "size_bytes":
        mistakes.add(
            (*path, "confidence"),
            "a size is exact: there is no interval to judge; leave it out.",
            code="does-not-fit-metric",
        )
    if not given and not wrong:
        mistakes.add(
            path,
            f"no limit; give {' or '.join(fitting)}, for example {{{fitting[0]}: 1.0}}.",
            code="missing-setting",
        )
