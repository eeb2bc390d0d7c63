"""Keys of a recipe with their types and defaults, and the functions that read a recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, field_validator

from smelt.core.errors import InputError, SettingError, did_you_mean
from smelt.data.splits import Windows
from smelt.data.tasks import ALL_TASKS, Task, TaskTraits, task_names, task_traits, tasks_with
from smelt.evaluate.latency import LatencySettings
from smelt.evaluate.metrics.metric import MetricSettingValues
from smelt.evaluate.metrics.registry import (
    DEFAULT_METRICS,
    METRICS,
    METRICS_BY_TASK,
    absent_metric_hint,
    base_metric,
    is_custom_metric,
    is_lower_better,
    metric_settings_type,
    takes_custom_metrics,
    variant_name,
)
from smelt.generation.config import GenerationSettings
from smelt.pipeline.recipe.launch_file import resolve_launch
from smelt.pipeline.recipe.model_and_data import (
    AxisSize,
    DataSettings,
    EmbeddingSettings,
    ModelSetting,
    ModuleModel,
    UntrainedModel,
)
from smelt.pipeline.recipe.stages import StageEntry, apply_overrides, load_stage, read_stages, step_names
from smelt.pipeline.recipe.validation_errors import (
    RecipeErrors,
    dotted_path,
    has_error,
    validate_settings,
    value_text,
)
from smelt.pipeline.recipe.yaml_file import KeyPath, YamlDocument
from smelt.runtimes.device import select_gpu
from smelt.stage import Settings
from smelt.training.processes import LaunchSettings

# Gates on latency: by wall-clock time, by CPU time.
SPEED_METRICS = ("speedup", "cpu_speedup")
EXACT_QUANTITIES = ("size_bytes", "operations")
"""Fields of a step in a report that gates limit, without an interval."""

# Splits that gates and the recommendation may be evaluated on.
JudgedOn = Literal["validation", "test"]

TrackerName = Literal["tensorboard", "mlflow", "wandb", "swanlab", "trackio"]
# Per tracker: the packages of which one must be installed, and the oldest supported release.
TRACKER_PACKAGES: dict[TrackerName, tuple[tuple[str, ...], str]] = {
    "tensorboard": (("tensorboard",), "2.18"),
    "mlflow": (("mlflow", "mlflow-skinny"), "2.14"),
    "wandb": (("wandb",), "0.18"),
    "swanlab": (("swanlab",), "0.5"),
    "trackio": (("trackio",), "0.8"),
}


# Samples on which layers and next tokens are compared by default, and the largest baseline where they are.
DEFAULT_COMPARED_SAMPLES = 16
MAX_COMPARED_PARAMETERS = 500_000_000
_COMPARED_BY_DEFAULT = (
    f"default: {DEFAULT_COMPARED_SAMPLES}; if the baseline has more than {MAX_COMPARED_PARAMETERS:,}"
    " parameters, 0"
)


class ScoreSettings(Settings):
    """What is measured after every step. `latency` is None if the recipe has `latency: false`."""

    quality: tuple[str, ...] = Field(default=(), description="metrics; the first is the main one")
    generation: GenerationSettings = Field(
        default=GenerationSettings(), description="how texts are generated"
    )
    latency: LatencySettings | Literal[False] | None = Field(
        default=LatencySettings(), description="false: not measured"
    )
    batch_size: int = Field(default=32, ge=1, le=4096, description="samples per call when scoring")
    folds: int | None = Field(
        default=None,
        ge=2,
        le=20,
        description="k-fold cross-validation over train; not of running text",
    )
    examples: int = Field(
        default=10,
        ge=0,
        le=50,
        description="changed samples that the report shows per step, with their texts",
    )
    sqnr_samples: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="validation samples on which each layer of a torch step is compared with the baseline's"
        f" (SQNR); 0: not compared; {_COMPARED_BY_DEFAULT}",
    )
    kl_samples: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="generated texts: samples on which next-token distributions are compared with the"
        f" baseline's (KL divergence); 0: not compared; {_COMPARED_BY_DEFAULT}",
    )

    def compared_samples(self, parameters: int | None) -> tuple[int, int]:
        """Return the samples on which layers and next tokens are compared.

        Args:
            parameters: of the baseline; None: unknown.
        """
        default = (
            0 if parameters is not None and parameters > MAX_COMPARED_PARAMETERS else DEFAULT_COMPARED_SAMPLES
        )
        layers, tokens = (default if n is None else n for n in (self.sqnr_samples, self.kl_samples))
        return layers, tokens

    @field_validator("latency")
    @classmethod
    def _convert_false(cls, value: LatencySettings | bool | None) -> LatencySettings | None:
        return value if isinstance(value, LatencySettings) else None


class GateSettings(Settings):
    """Limits of one metric."""

    max_degradation: float | None = Field(
        default=None, ge=0, description="largest allowed drop compared with the baseline"
    )
    min: float | None = Field(default=None, description="smallest allowed value")
    max: float | None = Field(default=None, description="largest allowed value")
    confidence: float | None = Field(
        default=None,
        ge=0.5,
        le=0.999,
        description="compare the worse end of this confidence interval, not the value",
    )
    at: str | tuple[str, ...] | None = Field(
        default=None, description="steps to check; default: the last of each branch"
    )


class ResourceSettings(Settings):
    """What a step needs of a node with `--executor ray`."""

    cpus: float | None = Field(
        default=None, gt=0, le=1024, description="cores; default: `threads`, else all of the smallest node"
    )
    gpus: float | None = Field(
        default=None, ge=0, le=64, description="GPUs; default: 1 if a node has one and `device` is not cpu"
    )
    memory_gb: float | None = Field(
        default=None, gt=0, description="memory that is reserved; default: as estimated"
    )


class RecipeKeys(Settings):
    """The keys of a recipe other than `stages`, as in the file."""

    model: ModelSetting = Field(
        description="folder, hub id, .onnx file, an untrained model, or a PyTorch module"
    )
    task: Task = Field(description="task of the model")
    tokenizer: str | None = Field(
        default=None, description="for an .onnx file: folder with config.json and tokenizer"
    )
    shapes: dict[str, tuple[AxisSize, ...]] = Field(
        default_factory=dict,
        description="for an .onnx file: new shapes of inputs, sizes or names of free axes",
    )
    data: DataSettings = Field(description="data of each split")
    embedding: EmbeddingSettings = Field(
        default=EmbeddingSettings(), description="sentence embedders: pooling and normalization"
    )
    score: ScoreSettings = Field(default=ScoreSettings(), description="what is measured after every step")
    baseline: str = Field(default="model", description="step that all others are compared with")
    gates: dict[str, GateSettings] = Field(default_factory=dict, description="limits by metric")
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="seed of all random numbers")
    truncation: Literal["warn", "error"] = Field(
        default="warn",
        description="texts beyond the model's limit: truncate with a warning, or stop with an error",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="number of torch threads; default: all cores"
    )
    device: str = Field(
        default="auto", description="auto, cpu, cuda, or one GPU: cuda:1; auto: CUDA if available"
    )
    launch: LaunchSettings = Field(
        default=LaunchSettings(), description="processes that train a stage together"
    )
    resources: ResourceSettings = Field(
        default=ResourceSettings(), description="what a step needs of a node with `--executor ray`"
    )
    trackers: tuple[TrackerName, ...] = Field(
        default=(), description="experiment trackers to which the run is logged"
    )

    @field_validator("device")
    @classmethod
    def _check_device(cls, name: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
            devices = ("auto", "cpu", "cuda", "cuda:1")
            raise SettingError(
                f"'{name[:60]}' is not a device; known: {', '.join(devices)}.{did_you_mean(name, devices)}",
                code="wrong-value",
            )
        return name


class ParsedRecipe(RecipeKeys):
    """A parsed recipe.

    stages: the steps as written. path: the file. metric_settings: the settings of metrics in score.quality,
    by metric. label_arrays: arrays of the data that only metrics read, which the plan sets. judged_on: the
    split for gates and the recommendation, as set by `gates.on`; None to let the plan choose. document: the
    file's content as plain values with `--set` applied, as in report.json. module: a PyTorch module as model;
    the plan writes a folder with it, which becomes `model`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    model: str | UntrainedModel
    module: ModuleModel | None = None
    stages: tuple[StageEntry, ...] = ()
    path: Path
    metric_settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    label_arrays: frozenset[str] = frozenset()
    judged_on: JudgedOn | None = None
    document: dict[str, Any] = Field(default_factory=dict)

    @property
    def traits(self) -> TaskTraits:
        """The traits of the task."""
        return task_traits(self.task)

    @property
    def base(self) -> Path:
        """The folder that paths in the recipe are relative to."""
        return self.path.parent


# Values that replace invalid parts, so that the rest of the recipe can be checked in the same pass.
_PLACEHOLDERS: dict[str, Any] = {"model": "", "task": ALL_TASKS[0], "data": {}}
_RECIPE_KEYS = (*RecipeKeys.model_fields, "stages")


def find_recipe(name_or_path: str) -> Path:
    """Return the recipe file for `name_or_path`: a path, or the name of a recipe included in smelt.

    Raises:
        InputError: no such recipe; the message suggests the closest name.
    """
    import smelt.configs

    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    shipped = {p.stem: p for p in Path(str(smelt.configs.__file__)).parent.glob("*.yaml")}
    if name_or_path in shipped:
        return shipped[name_or_path]
    if path.is_dir():
        model = (path / "config.json").is_file()
        hint = f" Create one for the model in it: `smelt init {name_or_path}`." if model else ""
        raise InputError(
            f"{name_or_path} is a folder, not a recipe. A recipe is a YAML file.{hint}", code="not-a-recipe"
        )
    file_names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    names = ", ".join(sorted(shipped)) or "none"
    hint = did_you_mean(path.name, [*file_names, *shipped])
    raise InputError(
        f"{name_or_path}: recipe not found. No such file, and the recipes included in smelt are: "
        f"{names}.{hint}",
        code="unknown-recipe",
    )


def check_recipe(
    document: YamlDocument, path: Path, overrides: Sequence[str]
) -> tuple[ParsedRecipe, RecipeErrors, set[str]]:
    """Check the keys and settings of a recipe, without reading its model and data.

    Returns:
        The recipe, with defaults and placeholders for invalid parts; the errors; the dotted paths of the
        invalid parts (a whole key such as `data`, or a part of it), which later checks must skip.
    """
    if not isinstance(document.value, dict):
        actual = "an empty file" if document.value is None else value_text(document.value)
        raise InputError(
            f"{document.name}:1: expected a recipe with the keys model, task, data and stages, got {actual}.",
            code="not-a-recipe",
            file=document.name,
            line=1,
        )
    errors = RecipeErrors(document)
    value: dict[str, Any] = document.value
    apply_overrides(value, overrides, errors, _RECIPE_KEYS)
    recipe_keys = {key: key_value for key, key_value in value.items() if key in RecipeKeys.model_fields}
    for key in value:
        if key not in _RECIPE_KEYS:
            hint = did_you_mean(key, _RECIPE_KEYS)
            errors.add(
                (key,),
                f"unknown key. Known keys: {', '.join(_RECIPE_KEYS)}.{hint}",
                code="unknown-setting",
            )
    metric_settings = extract_metric_settings(recipe_keys, errors)
    judged_on = _extract_judged_on(recipe_keys, errors)
    invalid_task = _check_task(recipe_keys, errors)
    keys, error_paths = validate_settings(RecipeKeys, recipe_keys | invalid_task, (), errors, _PLACEHOLDERS)
    assert keys is not None  # each key has a default or a placeholder
    invalid_paths = {dotted_path(error_path) for error_path in error_paths} | set(invalid_task)
    try:
        keys = keys.model_copy(update={"device": select_gpu(keys.device)})
    except InputError as error:
        errors.add_error(("device",), error)
    try:
        keys = keys.model_copy(update={"launch": resolve_launch(keys.launch, path.parent)})
    except InputError as error:
        errors.add_error(("launch", "config_file"), error)
    _check_data(keys, invalid_paths, errors)
    keys = _check_quality(keys, invalid_paths, errors)
    _check_gates(keys, metric_settings, invalid_paths, errors)
    entries, invalid_stages = read_stages(value.get("stages"), errors)
    if invalid_stages:
        invalid_paths.add("stages")
    if isinstance(keys.model, UntrainedModel) and "baseline" not in recipe_keys:
        names = zip(entries, step_names(entries), strict=True)
        trained = next(
            (name for entry, name in names if load_stage(entry.stage).trains_weights), keys.baseline
        )
        keys = keys.model_copy(update={"baseline": trained})
    fields: dict[str, Any] = {name: getattr(keys, name) for name in RecipeKeys.model_fields}
    if (
        judged_on == "validation"
        and "validation" not in keys.data.split_sources()
        and not has_error(invalid_paths, "data")
    ):
        errors.add(
            ("gates", "on"),
            "the recipe has no validation samples. Set data: validation.",
            code="missing-data",
        )
    if isinstance(keys.model, ModuleModel):
        fields |= {"model": "", "module": keys.model}
    fields |= {"metric_settings": metric_settings, "judged_on": judged_on, "document": value}
    recipe = ParsedRecipe(**fields, stages=tuple(entries), path=path)
    return recipe, errors, invalid_paths


def extract_metric_settings(values: dict[str, Any], errors: RecipeErrors) -> dict[str, dict[str, Any]]:
    """Replace each metric with settings by its name; return the settings by metric, without defaults.

    A metric of one class that is listed several times is named with its class, `f1(positive)`.
    """
    score = values.get("score")
    if not isinstance(score, dict) or not isinstance(score.get("quality"), list):
        return {}
    names: list[Any] = []
    given_settings: list[dict[str, Any]] = []
    for number, entry in enumerate(score["quality"]):
        path: KeyPath = ("score", "quality", number)
        name, metric_settings = entry, dict[str, Any]()
        if isinstance(entry, dict) and len(entry) == 1 and isinstance(next(iter(entry)), str):
            [(name, metric_settings)] = entry.items()
            path = (*path, name)
        names.append(name)
        given_settings.append({})
        if not isinstance(name, str) or (name not in METRICS and not is_custom_metric(name)):
            continue
        settings, _ = validate_settings(metric_settings_type(name), metric_settings, path, errors)
        if settings is not None:
            given_settings[-1] = settings.model_dump(exclude_defaults=True)
    class_metrics = [n for n in names if isinstance(n, str) and n in METRICS and METRICS[n].has_variants]
    names = [
        variant_name(name, metric_settings) if class_metrics.count(name) > 1 else name
        for name, metric_settings in zip(names, given_settings, strict=True)
    ]
    values["score"] = score | {"quality": names}
    return {
        name: metric_settings
        for name, metric_settings in zip(names, given_settings, strict=True)
        if metric_settings
    }


def _extract_judged_on(values: dict[str, Any], errors: RecipeErrors) -> JudgedOn | None:
    """Remove `on` from the gates (all other keys are metrics) and return it; None if not set."""
    gates = values.get("gates")
    if not isinstance(gates, dict) or "on" not in gates:
        return None
    values["gates"] = {name: gate for name, gate in gates.items() if name != "on"}
    for split in get_args(JudgedOn):
        if gates["on"] == split:
            return split  # type: ignore[no-any-return]
    errors.add(
        ("gates", "on"), f"expected validation or test, got {value_text(gates['on'])}.", code="wrong-value"
    )
    return None


def _check_task(values: dict[str, Any], errors: RecipeErrors) -> dict[str, Any]:
    """Return a replacement for an unknown task; an empty dict for a known one."""
    task = values.get("task")
    if not isinstance(task, str) or task in ALL_TASKS:
        return {}
    task_names = ", ".join(ALL_TASKS)
    hint = did_you_mean(task, ALL_TASKS)
    errors.add(
        ("task",),
        f"unknown task {value_text(task)}. Supported tasks: {task_names}.{hint}",
        code="unknown-task",
    )
    return {"task": ALL_TASKS[0]}


def _check_data(keys: RecipeKeys, invalid_paths: set[str], errors: RecipeErrors) -> None:
    """Check that there is a test split, each split has one source, and windows and embedding fit the task."""
    data = keys.data
    fractions = data.split.named_fractions()
    for name in fractions:
        if getattr(data, name) is not None:
            errors.add(
                ("data", "split", name),
                f"'{name}' also has its own file (data: {name}). Remove one of the two.",
                code="settings-conflict",
            )
    if fractions and data.train is None and not has_error(invalid_paths, "data.train"):
        errors.add(
            ("data", "split"),
            "takes samples from train, but data: train is missing. Set data: train.",
            code="missing-data",
        )
    elif "test" not in data.split_sources() and not has_error(
        invalid_paths, "data.test", "data.split", "data.train"
    ):
        or_split = " (or `split: {test: 0.1}` to take samples from train)" if data.train is not None else ""
        errors.add(
            ("data", "test"), f"missing. Expected a file or a hub id{or_split}.", code="missing-setting"
        )
    has_windows = task_traits(keys.task).samples != "running-text" and data.windows != Windows()
    if has_windows and not has_error(invalid_paths, "task", "data.windows"):
        errors.add(
            ("data", "windows"),
            f"only for {task_names(samples='running-text')}; the task is {keys.task}. Remove it.",
            code="does-not-fit-task",
        )
    if data.windows.stride is not None and task_traits(keys.task).architecture == "encoder":
        errors.add(
            ("data", "windows", "stride"),
            f"windows of {keys.task} do not overlap. Remove it.",
            code="does-not-fit-task",
        )
    if (
        task_traits(keys.task).output != "embedding"
        and keys.embedding != EmbeddingSettings()
        and not has_error(invalid_paths, "task", "embedding")
    ):
        errors.add(
            ("embedding",),
            f"only for {task_names(output='embedding')}; the task is {keys.task}. Remove it.",
            code="does-not-fit-task",
        )


def _check_quality(keys: RecipeKeys, invalid_paths: set[str], errors: RecipeErrors) -> RecipeKeys:
    """Check that the metrics fit the task, and fill in the task's defaults if none is named."""
    if has_error(invalid_paths, "task", "score.quality"):
        return keys
    task_metrics = METRICS_BY_TASK[keys.task]
    if not keys.score.quality:
        score = keys.score.model_copy(update={"quality": DEFAULT_METRICS[keys.task]})
        return keys.model_copy(update={"score": score})
    task_by_metric = {metric: task for task, metrics in METRICS_BY_TASK.items() for metric in metrics}
    for number, metric in enumerate(keys.score.quality):
        path: KeyPath = ("score", "quality", number)
        supported_text = f"Known for {keys.task}: {', '.join(task_metrics)}."
        if metric in keys.score.quality[:number]:
            errors.add(path, f"'{metric}' is listed twice. Remove one.", code="duplicate-metric")
        elif is_custom_metric(metric) and takes_custom_metrics(keys.task):
            continue  # a function, which the plan imports
        elif base_metric(metric) not in task_metrics:
            invalid_paths.add("score.quality")
            is_other_task = metric in task_by_metric or is_custom_metric(metric)
            owner = task_by_metric.get(
                metric, ", ".join(sorted((*tasks_with(output="text"), *tasks_with(output="labels"))))
            )
            problem = f"is a metric for {owner}" if is_other_task else "is not a metric"
            errors.add(
                path,
                f"{value_text(metric)} {problem}. {supported_text}"
                f"{absent_metric_hint(metric) or did_you_mean(metric, task_metrics)}",
                code="does-not-fit-task" if is_other_task else "unknown-metric",
            )
    return keys


def _check_gates(
    keys: RecipeKeys, settings: MetricSettingValues, invalid_paths: set[str], errors: RecipeErrors
) -> None:
    """Check that each gate is on a measured quantity and has limits that fit it."""
    if has_error(invalid_paths, "task"):
        return
    task_metrics = METRICS_BY_TASK[keys.task]
    measured_metrics = (
        task_metrics if has_error(invalid_paths, "score.quality") else keys.score.quality or task_metrics
    )
    limits: dict[str, tuple[str, ...]] = dict.fromkeys(measured_metrics, ("max_degradation", "min"))
    # lower is better for these, so `max_degradation` limits an increase
    limits |= {metric: ("max_degradation", "max") for metric in limits if is_lower_better(metric, settings)}
    limits |= {**dict.fromkeys(SPEED_METRICS, ("min",)), **dict.fromkeys(EXACT_QUANTITIES, ("max",))}
    if task_traits(keys.task).modality == "arrays":
        limits.pop("operations")  # of third-party graphs they are not counted
    for metric, gate in keys.gates.items():
        path: KeyPath = ("gates", metric)
        if metric not in limits:
            code, problem = (
                ("metric-not-scored", "is not measured. Add it to score.quality")
                if base_metric(metric) in task_metrics
                else ("unknown-metric", "is not a metric for gates")
            )
            errors.add(
                path,
                f"'{metric[:60]}' {problem}. Available: {', '.join(limits)}.{did_you_mean(metric, limits)}",
                code=code,
            )
            continue
        # latency disabled for one run by --set: the plan warns that the gate is not evaluated
        if (
            metric in SPEED_METRICS
            and not keys.score.latency
            and ("score", "latency") not in errors.overridden
        ):
            errors.add(
                path,
                f"{metric} needs latency measurements, but `latency: false` is set. Remove that setting or"
                " this gate.",
                code="settings-conflict",
            )
        _check_limits(metric, gate, limits[metric], path, errors, has_error(invalid_paths, f"gates.{metric}"))


def _check_limits(
    metric: str, gate: GateSettings, fitting: Sequence[str], path: KeyPath, errors: RecipeErrors, wrong: bool
) -> None:
    """Check the limits of one gate. wrong: an invalid part was dropped, which may have been the limit."""
    limit_names = [name for name in ("max_degradation", "min", "max") if getattr(gate, name) is not None]
    for name in limit_names:
        if name not in fitting:
            errors.add(
                (*path, name),
                f"not available for '{metric}'. Use {' or '.join(fitting)}.",
                code="does-not-fit-metric",
            )
    if gate.confidence is not None and metric in EXACT_QUANTITIES:
        errors.add(
            (*path, "confidence"),
            f"{metric} is exact and has no confidence interval. Remove confidence.",
            code="does-not-fit-metric",
        )
    if not limit_names and not wrong:
        errors.add(
            path,
            f"no limit. Set {' or '.join(fitting)}, for example {{{fitting[0]}: 1.0}}.",
            code="missing-setting",
        )


def check_reachable(metric: str, gate: GateSettings, path: KeyPath, errors: RecipeErrors) -> None:
    """Check that a value within the metric's range meets the limits, without which a search has no result."""
    metric_class = METRICS.get(base_metric(metric))
    low, high = metric_class.limits if metric_class else (-math.inf, math.inf)
    low = 1 if metric in EXACT_QUANTITIES else low
    for name, limit, unreachable in (
        ("min", gate.min, gate.min is not None and gate.min > high),
        ("max", gate.max, gate.max is not None and gate.max < low),
    ):
        if unreachable:
            errors.add(
                (*path, name),
                f"no model meets {name}: {limit:g}, because {metric} is from {low:g} to {high:g}. Change it.",
                code="unreachable-limit",
            )
