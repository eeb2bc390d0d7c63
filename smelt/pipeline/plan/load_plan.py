"""Turn a recipe into a plan, with all checks that need no work; all errors are reported together.

Checked are model, data and device, and, from config and data without torch, that each stage fits its input
model and samples. The plan also reports the default learning rates of training steps, and quantization
methods that do not suit their scheme.

Optional class methods of stages:

check_model(settings, config): returns the errors as messages with their settings, and the config of the
    output model (the same object if unchanged). Stages without it do not change the config.
check_teachers(settings, config, named): for settings that name other steps. config: of the output model;
    named: the configs of the named steps, by setting, as far as they are known.
check_rows(settings, task, data): returns the errors regarding the samples in the splits `data`.
required_metrics(settings): returns the metrics that settings name, as (setting, metric).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.compress.quantize.settings import two_bit_warnings
from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import resolve_path
from smelt.core.messages import Message, error_message, info
from smelt.core.system import install_command, package_problem
from smelt.data.splits import CLASSIFICATION_TASKS, SENTENCE_SIMILARITY, Split, Task
from smelt.evaluate.metrics.registry import find_metric
from smelt.models.families.registry import FAMILIES_BY_TASK, QUANTIZED_CONVOLUTIONS_KEY, no_blocks_reason
from smelt.models.text_rules import position_limit
from smelt.pipeline.inspect.machine import cuda_missing_reason, training_device
from smelt.pipeline.inspect.model_folder import (
    check_model_folder,
    local_model_folder,
    read_config,
    read_config_file,
)
from smelt.pipeline.inspect.model_info import QuantizedModelInfo, inspect_quantization, is_onnx
from smelt.pipeline.plan.metric_checks import check_metrics, custom_metric_notes
from smelt.pipeline.plan.onnx_models import (
    apply_graph_batch_size,
    apply_graph_signature,
    check_float_weights,
    check_generation_engines,
    check_onnx_model,
)
from smelt.pipeline.plan.plan import Plan, PlanStep, read_split_source
from smelt.pipeline.plan.plan_checker import (
    PlanChecker,
    check_baseline,
    check_latency_steps,
    choose_judging_split,
    plan_gates,
    set_engine_lengths,
    steps_until,
)
from smelt.pipeline.plan.quantized_steps import (
    prequantized_errors,
    qat_errors,
    quantization_lost_warnings,
)
from smelt.pipeline.plan.step_draft import idle_autotune_warnings
from smelt.pipeline.plan.task_checks import check_embedder, check_prompts, resolve_text_rules
from smelt.pipeline.plan.untrained_checks import (
    check_classifier,
    check_new_classifier,
    check_untrained,
    config_file,
    read_untrained_config,
)
from smelt.pipeline.plan.warnings import (
    agreement_warnings,
    data_warnings,
    decoding_warnings,
    last_checkpoint_warnings,
    launch_warnings,
)
from smelt.pipeline.recipe.model_and_data import UntrainedModel
from smelt.pipeline.recipe.recipe import TRACKER_PACKAGES, ParsedRecipe, check_recipe, find_recipe
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.pipeline.recipe.validation_errors import RecipeErrors, has_error
from smelt.pipeline.recipe.yaml_file import YamlDocument, read_yaml
from smelt.quantization.schemes.registry import SCHEMES
from smelt.training.processes import external_processes, strategy_conflicts
from smelt.training.settings import (
    TrainedPart,
    TrainingSettings,
    default_learning_rate,
    fp16_error,
    has_fewer_layers,
)

if TYPE_CHECKING:
    from smelt.pipeline.recipe.yaml_file import KeyPath


# Files up to this size are read for the plan, so that their errors are reported with the others.
_EAGER_READ_BYTES = 8_000_000
# Keys that `resolve_text_rules` reads.
_TEXT_KEYS = ("data.prefix", "data.source_language", "data.target_language", "data.prompt_template")


def check_model(
    recipe: ParsedRecipe, errors: RecipeErrors, bad: set[str], warnings: list[Message], notes: list[Message]
) -> Path | None:
    """Check the model's folder and return it; None for a hub id.

    bad: dotted paths of parts that are known to be invalid. warnings, notes: receive the warnings, and the
    notes for the plan.
    """
    model = recipe.model
    if has_error(bad, "model"):
        return None
    if not isinstance(model, str):  # see smelt.pipeline.plan.untrained_checks
        return None
    if not model.strip() or "\0" in model:
        errors.add(("model",), "expected a model's folder or a hub id, got an empty name.", code="empty-text")
        return None
    try:
        folder = local_model_folder(model, recipe.base)
        if folder is None:
            notes.append(
                info("from-the-hub", f"'{model}' is not a local folder; the run downloads it from the hub.")
            )
            return None
        task = None if has_error(bad, "task") else recipe.task
        problems, advice = check_model_folder(folder, task, recipe.baseline == MODEL_STEP)
    except (OSError, RuntimeError) as error:  # too long a name, a home folder that does not exist
        problems, advice, folder = [error_message("unreadable-file", f"cannot be read: {error}.")], [], None
    for problem in problems:
        errors.add_message(("model",), problem)
    warnings += [doubt.with_prefix("model: ") for doubt in advice]
    if folder is not None:
        _check_text_rules(recipe, folder, folder / "config.json", errors, bad)
    return folder


def _check_text_rules(
    recipe: ParsedRecipe, folder: Path, config: Path, errors: RecipeErrors, bad: set[str]
) -> None:
    """Check prefix, languages and prompt template, if the config can be read and its family fits the task."""
    kind = None if has_error(bad, "task", *_TEXT_KEYS) else read_config_file(config)[0].get("model_type")
    if kind in FAMILIES_BY_TASK[recipe.task]:
        try:
            resolve_text_rules(recipe, folder)
        except InputError as error:
            errors.add_error(("data",), error)


def _check_prompts(
    recipe: ParsedRecipe,
    folder: Path | None,
    splits: Mapping[str, Split],
    errors: RecipeErrors,
    bad: set[str],
) -> None:
    """Check that the prompt template fits the samples that were read."""
    if has_error(bad, "task", "model", *_TEXT_KEYS):
        return
    if not isinstance(recipe.model, str):
        folder = recipe.base / recipe.model.config
    if folder is None:
        return
    try:
        found = check_prompts(recipe, folder, splits)
    except InputError:  # of the template itself; reported with the model
        return
    for name, error in found:
        errors.add_message(("data", name), error)


def check_device(recipe: ParsedRecipe, errors: RecipeErrors, bad: set[str]) -> None:
    """Check that the requested device is available."""
    if recipe.device == "cuda" and not has_error(bad, "device") and (lack := cuda_missing_reason()):
        errors.add(("device",), lack, code="no-gpu")


def check_launch(
    recipe: ParsedRecipe,
    steps: Sequence[PlanStep],
    paths: Mapping[str, KeyPath],
    errors: RecipeErrors,
    bad: set[str],
) -> None:
    """Check that the strategy is installed and can train every stage, and the device its precision."""
    if has_error(bad, "launch", "device"):
        return
    launch = recipe.launch
    used = launch.num_processes > 1 or external_processes()
    for package, oldest in launch.required_packages().items() if used else ():
        if (lack := package_problem(package, oldest)) is not None:
            text = f"{lack}. {install_command(package, oldest)}"
            key = "strategy" if launch.config_file is None else "config_file"
            errors.add(("launch", key), text, code="not-installed")
    for step in steps:
        if not isinstance(step.settings, TrainingSettings):
            continue
        if problem := fp16_error(step.settings.precision, training_device(recipe.device)):
            errors.add_message((*paths[step.name], "precision"), problem)
        for name in strategy_conflicts(launch, step.settings):
            errors.add(
                (*paths[step.name], *name.split(": ")[:1]),
                f"strategy: {launch.strategy} cannot train with {name}. Remove it, or set launch: {{strategy:"
                " ddp}.",
                code="not-with-strategy",
            )


def check_folds(
    recipe: ParsedRecipe,
    steps: Sequence[PlanStep],
    splits: Mapping[str, Split],
    errors: RecipeErrors,
    bad: set[str],
) -> None:
    """Check that cross-validation fits task and samples, and that a stage learns from them."""
    if recipe.score.folds is None or has_error(bad, "task", "score.folds", "stages"):
        return
    path: KeyPath = ("score", "folds")
    if recipe.task not in (*CLASSIFICATION_TASKS, SENTENCE_SIMILARITY):
        fitting = ", ".join([*sorted(CLASSIFICATION_TASKS), SENTENCE_SIMILARITY])
        errors.add(path, f"cross-validation is for {fitting}. Remove folds.", code="does-not-fit-task")
    elif not any(step.trains for step in steps):
        text = "no stage trains, so that all folds would be equal. Remove folds, or add a training stage."
        errors.add(path, text, code="nothing-trains")
    elif "train" in splits:
        from smelt.data.split_division import divide_folds

        try:
            divide_folds(splits["train"], recipe.score.folds, recipe.seed)
        except InputError as error:
            errors.add_error(path, error)


def check_trackers(recipe: ParsedRecipe, errors: RecipeErrors, bad: set[str]) -> None:
    """Check that the packages of the trackers are installed."""
    for number, name in enumerate(recipe.trackers if not has_error(bad, "trackers") else ()):
        packages, oldest = TRACKER_PACKAGES[name]
        problems = [package_problem(package, oldest) for package in packages]
        if all(problems):
            text = f"{problems[0]}. {install_command(packages[0], oldest)}"
            errors.add(("trackers", number), text, code="not-installed")


def check_data(recipe: ParsedRecipe, errors: RecipeErrors, bad: set[str]) -> dict[str, Split]:
    """Check that the data files exist; read and return the small ones."""
    # samples cannot be checked without the task and the names of the columns
    readable = not has_error(bad, "task", "data.columns", "data.axes")
    splits: dict[str, Split] = {}
    for name, origin in recipe.data.split_files().items():
        if has_error(bad, f"data.{name}"):
            continue
        try:
            path = resolve_path(recipe.base, origin)
            if _is_hub_dataset(origin, path) or (path.is_file() and path.stat().st_size > _EAGER_READ_BYTES):
                continue
            if readable or not path.exists():
                splits |= read_split_source(recipe, name)
        except InputError as error:
            if error.found:
                errors.add_error(("data", name), error)
            for line in str(error).splitlines() if not error.found else ():
                errors.add(("data", name), line, code=error.code)
        except (OSError, RuntimeError, ValueError) as error:  # such as an invalid file name
            errors.add(("data", name), f"cannot be read: {error}.", code="unreadable-file")
    return splits if readable else {}


def _is_hub_dataset(origin: str, path: Path) -> bool:
    """Return whether `read_split` would download `origin` from the hub."""
    local = bool(path.suffix) or origin.startswith((".", "/", "~")) or "/" not in origin
    return not local and not path.exists()


def check_model_configs(
    steps: Sequence[PlanStep],
    setting_paths: dict[str, KeyPath],
    recipe: ParsedRecipe,
    folder: Path | None,
    errors: RecipeErrors,
) -> None:
    """Propagate the model's config through the tree of `steps`, and add errors where a step does not fit.

    Args:
        steps: parents first.
        setting_paths: path of each step's settings in the recipe.
        recipe: the recipe, which may start from a config without weights.
        folder: the model's folder; None if it is not downloaded or created yet.
        errors: receives the errors.
    """
    config = _start_config(recipe, folder)
    if config is None:
        return
    if folder is not None:
        coded = inspect_quantization(folder, config)
        for name, message, code in [*prequantized_errors(steps, coded), *qat_errors(steps, coded)]:
            errors.add(setting_paths[name], message, code=code)
        if coded is not None and no_blocks_reason(config) is not None:
            config = {**config, QUANTIZED_CONVOLUTIONS_KEY: True}
    configs: dict[str, Mapping[str, Any]] = {MODEL_STEP: config}
    for step in steps:
        before = configs.get(step.parent)
        if before is None:
            continue
        check = getattr(step.stage_class, "check_model", None)
        found, after = check(step.settings, before) if check else ([], before)
        compare = getattr(step.stage_class, "check_teachers", None)
        if compare and not found and not step.invalid_settings:
            references = step.settings.step_references().items()
            named = {setting: configs[name] for setting, name in references if name in configs}
            found = compare(step.settings, after, named)
        for error in found:
            setting = error.setting or ""
            if setting.partition(".")[0] not in step.invalid_settings:  # those were reported already
                errors.add_message((*setting_paths[step.name], *_setting_path(setting)), error)
        # with invalid settings the output config is unknown, unless the stage does not change it
        if after is before or not step.invalid_settings:
            configs[step.name] = after


def _start_config(recipe: ParsedRecipe, folder: Path | None) -> Mapping[str, Any] | None:
    """Return the config that a recipe starts from; None if it cannot be read or is not downloaded yet."""
    if isinstance(recipe.model, UntrainedModel):
        config, problems = read_untrained_config(config_file(recipe.model, recipe.base))
    elif folder is not None:
        config, problems = read_config(folder)
    else:
        return None
    return None if problems else config


def check_window_length(recipe: ParsedRecipe, folder: Path | None, errors: RecipeErrors) -> None:
    """Add an error if windows are longer than the model's number of positions.

    folder: None if the model is not downloaded or created yet.
    """
    length = recipe.data.windows.length
    if length is None:
        return
    config: Mapping[str, Any] = {}
    if isinstance(recipe.model, UntrainedModel):
        config, _ = read_untrained_config(config_file(recipe.model, recipe.base))
    elif folder is not None:
        config, _ = read_config(folder)
    limit = position_limit(config)
    if limit is not None and length > limit:
        errors.add(
            ("data", "windows", "length"),
            f"{length} exceeds the model's limit of {limit} tokens. Set {limit} or less.",
            code="window-too-long",
        )


def check_stage_data(
    steps: Sequence[PlanStep],
    setting_paths: dict[str, KeyPath],
    task: Task,
    splits: Mapping[str, Split],
    errors: RecipeErrors,
    bad: set[str],
) -> None:
    """Add the errors in settings that do not fit the task or the samples of `splits`.

    bad: dotted paths of parts that are known to be invalid; with an invalid task nothing is checked.
    """
    if has_error(bad, "task"):
        return
    for step in steps:
        check = getattr(step.stage_class, "check_rows", None)
        for error in check(step.settings, task, splits) if check else ():
            setting = error.setting or ""
            if setting.split(".")[0] not in step.invalid_settings:
                errors.add_message((*setting_paths[step.name], *_setting_path(setting)), error)


def check_stage_metrics(
    steps: Sequence[PlanStep], setting_paths: dict[str, KeyPath], quality: Sequence[str], errors: RecipeErrors
) -> None:
    """Add an error for each metric that settings name and the recipe does not score.

    quality: the scored metrics; empty if they depend on the data, then nothing is checked.
    """
    # outputs of the baseline are not known while a step trains
    known = [metric for metric in quality if not find_metric(metric).compares_with_baseline]
    for step in steps if quality else ():
        named = getattr(step.stage_class, "required_metrics", None)
        for setting, metric in named(step.settings) if named else ():
            if metric not in known and setting.split(".")[0] not in step.invalid_settings:
                errors.add(
                    (*setting_paths[step.name], *_setting_path(setting)),
                    f"'{metric}' is not scored during a stage, only {', '.join(known) or 'nothing'}."
                    f"{did_you_mean(metric, known)} Add other metrics to score: {{quality: [...]}}.",
                    code="metric-not-scored",
                )


def _setting_path(setting: str) -> tuple[str | int, ...]:
    """Return the path of a setting such as `phases.0.losses` relative to its step."""
    return tuple(int(word) if word.isdigit() else word for word in setting.split(".") if word)


def default_rate_notes(
    steps: Sequence[PlanStep], config: Mapping[str, Any], quantization: QuantizedModelInfo | None
) -> Iterator[Message]:
    """Yield a note with the default learning rates of the training steps that do not set one.

    Steps after a stage that changes the model's width, and students that are another model, are not included:
    their rate is known when the step starts, and is in its log.

    Args:
        steps: steps of the plan, parents first.
        config: config of the original model; empty if not available.
        quantization: quantized weights of the original model; None for floats.
    """
    notes = []
    known: dict[str, tuple[str, ...]] = (
        {MODEL_STEP: tuple(quantization.schemes) if quantization else ()} if config else {}
    )
    configs = {MODEL_STEP: config}
    for step in steps:
        settings: Any = step.settings
        if step.parent not in known or settings.replaces_model:
            continue
        if "width" in getattr(settings, "targets", ()):
            continue
        codes, before = known[step.parent], configs[step.parent]
        known[step.name] = tuple(settings.used_schemes()) if step.stage == "quantize" else codes
        check = getattr(step.stage_class, "check_model", None)
        configs[step.name] = after = check(settings, before)[1] if check else before
        if isinstance(settings, TrainingSettings) and _has_default_rate(settings):
            notes.append(f"{step.name} {_rate_text(settings, after, codes, has_fewer_layers(after, config))}")
    if notes:
        yield info("default-learning-rate", f"default learning rates: {'; '.join(notes)}")


def _has_default_rate(settings: Any) -> bool:
    """Return whether a training, or one of its phases, has no learning rate of its own."""
    return any(
        phase.learning_rate is None for phase in getattr(settings, "phase_settings", lambda: [settings])()
    )


def _rate_text(settings: Any, config: Mapping[str, Any], codes: tuple[str, ...], lost: bool) -> str:
    """Return the default rates of one training as text. lost: whether layers were removed."""
    what: TrainedPart = "weights"
    if settings.lora is not None:
        what = "adapters"
    elif lost:
        what = "fewer layers"
    rate = f"{default_learning_rate(config, what):.2g}"
    few = [name for name in codes if SCHEMES[name].requires_training or 0 < SCHEMES[name].bits < 4]
    if what == "adapters" or not few:
        return f"{rate} ({what})"
    through = f"{default_learning_rate(config, 'few bits'):.2g}"
    if len(few) == len(codes):
        return f"{through} (few bits)"
    return f"{through} if most weights have fewer than four bits, else {rate}"


def unsuitable_method_notes(steps: Sequence[PlanStep]) -> Iterator[Message]:
    """Yield a note for each step whose method does not suit its scheme; the run warns about it again.

    Steps with `mixed_precision` are skipped: their bit widths are chosen during the run.
    """
    for step in steps:
        settings: Any = step.settings
        if getattr(settings, "method", None) == "hqq" and getattr(settings, "mixed_precision", None) is None:
            for found in two_bit_warnings(settings.used_schemes()):
                yield replace(found, severity="info", step=step.name)


def load_plan(recipe: str | Path, overrides: Sequence[str] = (), until: str | None = None) -> Plan:
    """Read and check a recipe (a file, or the name of one included in smelt) and return its plan.

    Raises:
        InputError: there are errors in the recipe, the model's folder or the data; one per line, each with
            file and line.
    """
    path = recipe if isinstance(recipe, Path) else find_recipe(recipe)
    return make_plan(read_yaml(path), path, overrides, until)


def make_plan(
    document: YamlDocument, path: Path, overrides: Sequence[str] = (), until: str | None = None
) -> Plan:
    """Check the recipe in `document`, as if it were the file `path`, and return its plan.

    Raises:
        InputError: as `load_plan`.
    """
    read, errors, bad = check_recipe(document, path, overrides)
    from_graph = is_onnx(read.model, read.base)
    checker = PlanChecker(read, errors, bad, "onnx" if from_graph else "torch")
    every = set_engine_lengths(checker.build_steps(), read, checker.setting_paths, errors)
    kept = steps_until(checker, until)
    judged = plan_gates(checker, kept)
    check_latency_steps(checker)
    check_baseline(checker, kept)
    foreign = check_onnx_model(read, errors, bad, checker.warnings)
    read = apply_graph_signature(apply_graph_batch_size(read, foreign, errors), foreign, errors)
    if from_graph:
        folder = foreign.tokenizer_folder if foreign else None
    else:
        folder = check_model(read, errors, bad, checker.warnings, checker.notes)
    check_untrained(read, every, errors, bad)
    if isinstance(read.model, UntrainedModel) and not has_error(bad, "model"):
        config = config_file(read.model, read.base)
        _check_text_rules(read, resolve_path(read.base, read.model.config), config, errors, bad)
    check_new_classifier(read, every, folder, errors)
    check_model_configs(every, checker.setting_paths, read, folder, errors)
    check_generation_engines(foreign, every, checker.setting_paths, errors)
    check_float_weights(foreign, every, checker.setting_paths, errors)
    check_window_length(read, folder, errors)
    splits = check_data(read, errors, bad)
    if not has_error(bad, "score.quality", "task"):
        check_metrics(read, splits, errors)
    _check_prompts(read, folder, splits, errors, bad)
    check_device(read, errors, bad)
    check_launch(read, every, checker.setting_paths, errors, bad)
    check_trackers(read, errors, bad)
    check_folds(read, every, splits, errors, bad)
    read, problem = check_classifier(read, folder, splits, errors, bad)
    read = check_embedder(read, folder, splits, errors, bad, checker.warnings)
    check_stage_data(every, checker.setting_paths, read.task, splits, errors, bad)
    if not has_error(bad, "task", "score.quality"):
        check_stage_metrics(every, checker.setting_paths, read.score.quality, errors)
    errors.raise_if_any()
    steps = tuple(step for step in every if step.name in kept)
    doubts = [
        *launch_warnings(read),
        *agreement_warnings(read),
        *last_checkpoint_warnings(read, steps),
        *data_warnings(read, any(step.trains for step in steps), splits),
    ]
    doubts += decoding_warnings(read, folder) if folder else []
    config = read_config(folder)[0] if folder and not from_graph else {}
    doubts += quantization_lost_warnings(steps, config)
    coded = inspect_quantization(folder, config) if folder and not from_graph else None
    floats = isinstance(read.model, UntrainedModel) or (folder is not None and not coded)
    doubts += [] if from_graph else idle_autotune_warnings(steps, floats)
    if isinstance(read.model, UntrainedModel):
        config = read_untrained_config(config_file(read.model, read.base))[0]
    checker.notes += [*default_rate_notes(steps, config, coded), *unsuitable_method_notes(steps)]
    checker.notes += custom_metric_notes(read)
    return Plan(
        recipe=read,
        steps=steps,
        gates=judged,
        local_model=folder,
        splits=splits,
        warnings=(*checker.warnings, *doubts),
        notes=tuple(checker.notes),
        until=until,
        excluded_steps=tuple(step for step in every if step.name not in kept),
        step_order=tuple(step.name for step in every),
        judged_on=choose_judging_split(checker, splits),
        problem_type=problem,
        onnx_model=foreign,
    )
