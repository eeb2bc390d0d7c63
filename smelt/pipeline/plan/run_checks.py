"""Check data, device, launch, trackers, metrics, gates and folds of a recipe, and what its stages need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, MissingDependencyError, did_you_mean
from smelt.core.files import resolve_path
from smelt.core.messages import Message, error_message, info, warning
from smelt.core.system import install_command, package_problem
from smelt.data.dataset_rows import folder_splits
from smelt.data.splits import Split
from smelt.data.tasks import tasks_with
from smelt.evaluate.custom_metric import load_custom_metric
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC, find_metric, is_custom_metric
from smelt.pipeline.inspect.machine import cuda_missing_reason, training_device
from smelt.pipeline.plan.check_context import CheckContext, skip_if_invalid
from smelt.pipeline.plan.plan import PlannedGate, PlanStep, read_split_source
from smelt.pipeline.plan.warnings import MIN_JUDGING_ROWS
from smelt.pipeline.recipe.recipe import SPEED_METRICS, TRACKER_PACKAGES, JudgedOn, ParsedRecipe
from smelt.pipeline.recipe.stages import MODEL_STEP
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
            if _is_hub_dataset(origin, path) or _bytes_to_read(path) > _EAGER_READ_BYTES:
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


def _bytes_to_read(path: Path) -> int:
    """Return the size of a file, or of a folder of a data set; 0 for other folders."""
    if path.is_file():
        return path.stat().st_size
    is_dataset = folder_splits(path) is not None
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if is_dataset else 0


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
    outputs = ("labels", "embedding", "text")
    if recipe.traits.output not in outputs:
        tasks = ", ".join(task for output in outputs for task in tasks_with(output=output))
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


def select_steps(context: CheckContext) -> tuple[Finding, ...]:
    """Select the step `until` and all steps that it needs; all steps without it."""
    until, names = context.until, list(context.drafts)
    if until == MODEL_STEP:
        names = []
    elif until is not None and until in context.drafts:
        required = {until}
        for name, draft in reversed(context.drafts.items()):  # dependencies come before a step
            if name in required:
                required |= {draft.parent or MODEL_STEP, *draft.references.values()}
        names = [name for name in context.drafts if name in required]
    elif until is not None and not context.may_exist(until):
        text = context.unknown_step_text(until)
        context.errors.add_for_option(text, code="unknown-step", option="--until")
    context.included_names = names
    return ()


def plan_gates(context: CheckContext) -> Iterator[Finding]:
    """Find the steps of each gate: those of `at`, or the last scored step of each branch.

    With `--until`, a gate whose steps are all excluded is not evaluated: its limit was written for another
    step than the last one of the shortened run.
    """
    gates: list[PlannedGate] = []
    included = (MODEL_STEP, *context.included_names)
    for metric, gate in context.recipe.gates.items():
        step_names = (gate.at,) if isinstance(gate.at, str) else gate.at
        if context.is_invalid(f"gates.{metric}.at"):
            step_names = None
        for name in step_names or ():
            if not context.may_exist(name):
                text = context.unknown_step_text(name)
                yield ("gates", metric, "at"), error_message("unknown-step", text)
        if metric in SPEED_METRICS and context.recipe.score.latency is None:
            text = f"The gate on {metric} is not evaluated: latency is not measured (score.latency: false)."
            yield (), warning("gate-not-judged", text)
            continue
        names = step_names or context.leaf_names
        steps = tuple(name for name in names if name in included)
        excluded = [name for name in names if name in context.step_names and name not in included]
        if excluded and (step_names or not steps):
            text = f"The gate on {metric} is not evaluated at {', '.join(excluded)}: excluded by --until."
            yield (), warning("gate-not-judged", text)
        limits = {"max_degradation": gate.max_degradation, "min": gate.min, "max": gate.max}
        if context.recipe.baseline not in included:
            limits.pop("max_degradation")  # no baseline to compare with; check_baseline warns about it
            if metric == AGREEMENT_METRIC and context.recipe.traits.modality != "arrays":
                limits = {}
        set_limits = [(kind, limit) for kind, limit in limits.items() if limit is not None and steps]
        gates += [PlannedGate(metric, kind, limit, steps, gate.confidence) for kind, limit in set_limits]
    context.gates = tuple(gates)


@skip_if_invalid("score.latency.steps")
def check_latency_steps(context: CheckContext) -> Iterator[Finding]:
    """Check that the names in `score.latency.steps` are steps."""
    latency = context.recipe.score.latency
    for name in latency.named_steps() if latency else ():
        if not context.may_exist(name):
            text = context.unknown_step_text(name)
            yield ("score", "latency", "steps"), error_message("unknown-step", text)


# `torch.compile` takes the variable CXX, else one of these
_CXX_COMPILERS = tuple(filter(None, (os.environ.get("CXX"), "g++", "clang++", "cl")))


@skip_if_invalid("baseline", "score.latency.baseline")
def check_compiled_baseline(context: CheckContext) -> Iterator[Finding]:
    """Check that a baseline to be compiled is a torch model that generates nothing."""
    recipe = context.recipe
    if not recipe.score.latency or recipe.score.latency.baseline != "compiled":
        return
    path = ("score", "latency", "baseline")
    draft = context.drafts.get(recipe.baseline)
    if (context.start_format if draft is None else draft.format) not in ("torch", None):
        text = f"the baseline '{recipe.baseline}' is a graph, which torch does not compile; remove it."
        yield path, error_message("does-not-fit-model", text)
    elif recipe.traits.generates:
        text = f"models of {recipe.task} run once for each token, which is not compiled; remove it."
        yield path, error_message("does-not-fit-task", text)
    elif (message := _missing_compiler()) is not None:
        yield path, message


def _missing_compiler() -> Message | None:
    """Return an error if torch.compile finds no C++ compiler."""
    if any(map(shutil.which, _CXX_COMPILERS)):
        return None
    text = (
        f"torch.compile requires a C++ compiler, and none of {', '.join(_CXX_COMPILERS)} is on the PATH."
        " Install one (apt install g++), or remove it."
    )
    return error_message("no-compiler", text)


@skip_if_invalid("stages")
def check_compiled_trainings(context: CheckContext) -> Iterator[Finding]:
    """Check that a training to be compiled finds a compiler."""
    for step in context.steps:
        settings: Any = step.settings
        if getattr(settings, "torch_compile", False) and (message := _missing_compiler()) is not None:
            yield context.setting_path(step.name, "torch_compile"), message


def compiled_training_notes(steps: Sequence[PlanStep]) -> Iterator[Message]:
    """Yield a note for each training that is compiled: until its first update it seems to hang."""
    for step in steps:
        settings: Any = step.settings
        if getattr(settings, "torch_compile", False):
            text = "torch_compile compiles before the first update, which takes a minute or more."
            yield replace(info("compilation-time", text), step=step.name)


@skip_if_invalid("baseline")
def check_baseline(context: CheckContext) -> Iterator[Finding]:
    """Check that the baseline is a step of the run and can be scored."""
    name = context.recipe.baseline
    if name == MODEL_STEP:
        return
    if name in context.included_names:
        if reason := context.drafts[name].unscored:
            text = f"No step is compared with the baseline '{name}': {reason}"
            yield (), warning("no-comparison", text)
    elif name in context.step_names:
        text = f"The baseline '{name}' is excluded by --until, so no step is compared with it."
        yield (), warning("no-comparison", text)
    elif not context.may_exist(name):
        yield ("baseline",), error_message("unknown-step", context.unknown_step_text(name))


def choose_judging_split(context: CheckContext) -> JudgedOn:
    """Return the split on which gates and the recommendation are evaluated.

    Choosing the best of several branches on test overestimates its score. So the choice is made on validation
    and the chosen step is scored on test. The default is test if validation has too few samples, or for
    sentence similarity, whose validation samples need no scores. Files that were not read are large.
    """
    recipe, files = context.recipe, context.recipe.data.split_files()
    if recipe.judged_on is not None:
        return recipe.judged_on
    if "validation" not in recipe.data.split_sources() or recipe.traits.output == "embedding":
        return "test"
    validation = context.splits.get("validation", range(MIN_JUDGING_ROWS))
    is_small = recipe.traits.samples != "running-text" and len(validation) < MIN_JUDGING_ROWS
    is_test = files.get("validation") is not None and files.get("validation") == files.get("test")
    return "test" if is_small or is_test or len(context.leaf_names) < 2 else "validation"


@skip_if_invalid("score.quality", "task")
def check_metrics(context: CheckContext) -> Iterator[Finding]:
    """Check what the recipe's metrics need: a tokenizer that fits, choices, data, a model, a function."""
    recipe = context.recipe
    scored = {name: context.splits[name] for name in ("test", "validation") if name in context.splits}
    for index, metric in enumerate(recipe.score.quality):
        path: KeyPath = ("score", "quality", index)
        try:
            if is_custom_metric(metric):
                load_custom_metric(metric, recipe.base)
            else:
                find_metric(metric).check(recipe.metric_settings.get(metric, {}), recipe.base, scored)
        except (InputError, MissingDependencyError) as error:
            setting = () if error.setting is None else (metric, error.setting)
            yield (*path, *setting), error_message(error.code, str(error))


def custom_metric_notes(recipe: ParsedRecipe) -> Iterator[Message]:
    """Yield that a plan has imported a user's custom metrics, which runs their code, and from where."""
    for metric in filter(is_custom_metric, recipe.score.quality):
        source = load_custom_metric(metric, recipe.base).file
        yield info(
            "custom-metric-imported",
            f"score.quality: imports '{metric}' from {source or 'a module without a file'}, which runs its"
            " code, also in this check.",
        )
