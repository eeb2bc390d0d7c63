"""Check data, device, launch, trackers and folds of a recipe, and the data and metrics that stages need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import resolve_path
from smelt.core.messages import error_message
from smelt.core.system import install_command, package_problem
from smelt.data.splits import Split
from smelt.data.tasks import tasks_with
from smelt.evaluate.metrics.registry import find_metric
from smelt.pipeline.inspect.machine import cuda_missing_reason, training_device
from smelt.pipeline.plan.check_context import CheckContext, skip_if_invalid
from smelt.pipeline.plan.plan import read_split_source
from smelt.pipeline.recipe.recipe import TRACKER_PACKAGES
from smelt.pipeline.recipe.validation_errors import Finding, error_findings
from smelt.pipeline.recipe.yaml_file import KeyPath
from smelt.training.processes import external_processes, strategy_conflicts
from smelt.training.settings import TrainingSettings, fp16_error

# Files up to this size are read for the plan, so that their errors are reported with the others.
_EAGER_READ_BYTES = 8_000_000


def read_data(context: CheckContext) -> Iterator[Finding]:
    """Check that the data files exist, and read the small ones."""
    recipe = context.recipe
    # samples cannot be checked without the task and the names of the columns
    readable = not context.is_invalid("task", "data.columns", "data.axes")
    splits: dict[str, Split] = {}
    for name, origin in recipe.data.split_files().items():
        if context.is_invalid(f"data.{name}"):
            continue
        try:
            path = resolve_path(recipe.base, origin)
            if _is_hub_dataset(origin, path) or (path.is_file() and path.stat().st_size > _EAGER_READ_BYTES):
                continue
            if readable or not path.exists():
                splits |= read_split_source(recipe, name)
        except InputError as error:
            if error.messages:
                yield from error_findings(("data", name), error)
            for line in str(error).splitlines() if not error.messages else ():
                yield ("data", name), error_message(error.code, line)
        except (OSError, RuntimeError, ValueError) as error:  # such as an invalid file name
            yield ("data", name), error_message("unreadable-file", f"cannot be read: {error}.")
    context.splits = splits if readable else {}


def _is_hub_dataset(origin: str, path: Path) -> bool:
    """Return whether `read_split` would download `origin` from the hub."""
    local = bool(path.suffix) or origin.startswith((".", "/", "~")) or "/" not in origin
    return not local and not path.exists()


@skip_if_invalid("device")
def check_device(context: CheckContext) -> Iterator[Finding]:
    """Check that the requested device is available."""
    if context.recipe.device == "cuda" and (reason := cuda_missing_reason()):
        yield ("device",), error_message("no-gpu", reason)


@skip_if_invalid("launch", "device")
def check_launch(context: CheckContext) -> Iterator[Finding]:
    """Check that the strategy is installed and can train every stage, and the device its precision."""
    launch = context.recipe.launch
    is_distributed = launch.num_processes > 1 or external_processes()
    for package, oldest in launch.required_packages().items() if is_distributed else ():
        if (problem := package_problem(package, oldest)) is not None:
            key = "strategy" if launch.config_file is None else "config_file"
            text = f"{problem}. {install_command(package, oldest)}"
            yield ("launch", key), error_message("not-installed", text)
    for step in context.steps:
        if not isinstance(step.settings, TrainingSettings):
            continue
        if message := fp16_error(step.settings.precision, training_device(context.recipe.device)):
            yield context.setting_path(step.name, "precision"), message
        for name in strategy_conflicts(launch, step.settings):
            text = (
                f"strategy: {launch.strategy} cannot train with {name}. Remove it, or set launch: {{strategy:"
                " ddp}."
            )
            yield (
                context.setting_path(step.name, name.split(": ")[0]),
                error_message("not-with-strategy", text),
            )


@skip_if_invalid("trackers")
def check_trackers(context: CheckContext) -> Iterator[Finding]:
    """Check that the packages of the trackers are installed."""
    for number, name in enumerate(context.recipe.trackers):
        packages, oldest = TRACKER_PACKAGES[name]
        problems = [package_problem(package, oldest) for package in packages]
        if all(problems):
            text = f"{problems[0]}. {install_command(packages[0], oldest)}"
            yield ("trackers", number), error_message("not-installed", text)


@skip_if_invalid("task", "score.folds", "stages")
def check_folds(context: CheckContext) -> Iterator[Finding]:
    """Check that cross-validation fits task and samples, and that a stage learns from them."""
    recipe = context.recipe
    if recipe.score.folds is None:
        return
    path: KeyPath = ("score", "folds")
    if recipe.traits.output not in ("labels", "embedding"):
        tasks = ", ".join([*tasks_with(output="labels"), *tasks_with(output="embedding")])
        yield path, error_message("does-not-fit-task", f"cross-validation is for {tasks}. Remove folds.")
    elif not any(step.trains for step in context.steps):
        text = "no stage trains, so that all folds would be equal. Remove folds, or add a training stage."
        yield path, error_message("nothing-trains", text)
    elif "train" in context.splits:
        from smelt.data.split_division import divide_folds

        try:
            divide_folds(context.splits["train"], recipe.score.folds, recipe.seed)
        except InputError as error:
            yield from error_findings(path, error)


@skip_if_invalid("task")
def check_stage_data(context: CheckContext) -> Iterator[Finding]:
    """Check that settings of stages fit the task and the samples that were read."""
    for step in context.steps:
        errors = step.stage_class.check_rows(step.settings, context.recipe.task, context.splits)
        yield from context.setting_findings(step, errors)


@skip_if_invalid("task", "score.quality")
def check_stage_metrics(context: CheckContext) -> Iterator[Finding]:
    """Check that the metrics that settings of stages name are scored, if the scored metrics are known."""
    quality = context.recipe.score.quality
    # outputs of the baseline are not known while a step trains
    available = [metric for metric in quality if not find_metric(metric).compares_with_baseline]
    for step in context.steps if quality else ():
        for setting, metric in step.stage_class.required_metrics(step.settings):
            if metric not in available:
                text = (
                    f"'{metric}' is not scored during a stage, only {', '.join(available) or 'nothing'}."
                    f"{did_you_mean(metric, available)} Add other metrics to score: {{quality: [...]}}."
                )
                message = error_message("metric-not-scored", text, setting=setting)
                yield from context.setting_findings(step, [message])
