"""Turn a recipe into a plan, with all checks that need no work; all errors are reported together.

Checked are model, data and device, and, from config and data without torch, that each stage fits its input
model and samples. The plan also reports the default learning rates of training steps, and quantization
methods that do not suit their scheme, and schemes that are not exported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smelt.compress.quantize.scheme_settings import simulated_activation_warnings
from smelt.compress.quantize.settings import (
    QuantizeSettings,
    two_bit_warnings,
)
from smelt.core.artifact import Format
from smelt.core.errors import InputError
from smelt.core.files import resolve_path
from smelt.core.messages import Message, error_message, info
from smelt.models.families.limits import no_blocks_reason
from smelt.models.families.registry import FAMILIES_BY_TASK, QUANTIZED_CONVOLUTIONS_KEY
from smelt.models.model_size import read_model_size
from smelt.models.text_rules import position_limit, window_length
from smelt.models.weight_files import has_weights
from smelt.pipeline.inspect.find_model import adapter_note, local_model_folder
from smelt.pipeline.inspect.model_folder import (
    check_model_folder,
    read_config,
    read_config_file,
)
from smelt.pipeline.inspect.model_info import QuantizedModelInfo, inspect_quantization, is_onnx, max_tokens
from smelt.pipeline.plan.check_context import Check, CheckContext, skip_if_invalid
from smelt.pipeline.plan.module_model import read_user_module
from smelt.pipeline.plan.onnx_models import (
    check_float_weights,
    check_generation_engines,
    check_graph_settings,
    read_onnx_model,
)
from smelt.pipeline.plan.plan import Plan, PlanStep
from smelt.pipeline.plan.quantized_steps import prequantized_errors, qat_errors, quantization_lost_warnings
from smelt.pipeline.plan.run_checks import (
    check_baseline,
    check_compiled_baseline,
    check_compiled_trainings,
    check_device,
    check_folds,
    check_latency_steps,
    check_launch,
    check_metrics,
    check_stage_data,
    check_stage_metrics,
    check_trackers,
    choose_judging_split,
    compiled_training_notes,
    custom_metric_notes,
    plan_gates,
    read_data,
    select_steps,
)
from smelt.pipeline.plan.step_checks import (
    check_teacher_tokenizers,
    read_steps,
    set_autotune_sizes,
    set_engine_sizes,
)
from smelt.pipeline.plan.step_draft import idle_autotune_warnings
from smelt.pipeline.plan.task_checks import (
    embedder_errors,
    metrics_of_samples,
    prompt_errors,
    resolve_pooling,
    resolve_text_rules,
)
from smelt.pipeline.plan.untrained_checks import (
    check_new_classifier,
    check_untrained,
    config_file,
    planned_classifier,
    read_untrained_config,
    resolve_classifier,
)
from smelt.pipeline.plan.warnings import (
    agreement_warnings,
    data_warnings,
    decoding_warnings,
    last_checkpoint_warnings,
    launch_warnings,
    lost_work_warnings,
)
from smelt.pipeline.recipe.model_and_data import UntrainedModel
from smelt.pipeline.recipe.recipe import check_recipe, find_recipe
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.pipeline.recipe.validation_errors import Finding, error_findings
from smelt.pipeline.recipe.yaml_file import YamlDocument, read_yaml
from smelt.quantization.schemes.registry import SCHEMES, supported_targets
from smelt.training.settings import (
    TrainedPart,
    TrainingSettings,
    default_learning_rate,
    has_fewer_layers,
)

# Keys that `resolve_text_rules` reads.
_TEXT_KEYS = ("data.prefix", "data.source_language", "data.target_language", "data.prompt_template")


@skip_if_invalid("model")
def read_model_folder(context: CheckContext) -> Iterator[Finding]:
    """Find the model's folder and check its files; a hub id is downloaded by the run."""
    recipe, model = context.recipe, context.recipe.model
    if not isinstance(model, str) or context.start_format == "onnx":  # other checks read these
        return
    if not model.strip() or "\0" in model:
        text = "expected a model's folder or a hub id, got an empty name."
        yield ("model",), error_message("empty-text", text)
        return
    problems: list[Message]
    try:
        folder = local_model_folder(model, recipe.base)
        text = f"'{model}' is not a local folder; the run downloads it from the hub."
        note = adapter_note(model, recipe.base) or (info("from-the-hub", text) if folder is None else None)
        if note is not None:
            yield (), note
        if folder is None:
            return
        task = None if context.is_invalid("task") else recipe.task
        problems, advice = check_model_folder(folder, task, recipe.baseline == MODEL_STEP)
    except InputError as error:  # of an adapter
        yield from error_findings(("model",), error)
        return
    except (OSError, RuntimeError) as error:  # too long a name, a home folder that does not exist
        problems, advice, folder = [error_message("unreadable-file", f"cannot be read: {error}.")], [], None
    for problem in problems:
        yield ("model",), problem
    for message in advice:
        yield (), message.with_prefix("model: ")
    context.model_folder = folder


@skip_if_invalid("model", "task", *_TEXT_KEYS)
def check_text_rules(context: CheckContext) -> Iterator[Finding]:
    """Check prefix, languages and prompt template, if the config can be read and its family fits the task."""
    recipe = context.recipe
    if isinstance(recipe.model, UntrainedModel):
        folder: Path | None = resolve_path(recipe.base, recipe.model.config)
        config = config_file(recipe.model, recipe.base)
    elif context.start_format == "torch" and context.model_folder is not None:
        folder = context.model_folder
        config = folder / "config.json"
    else:
        return
    if read_config_file(config)[0].get("model_type") in FAMILIES_BY_TASK.get(recipe.task, ()):
        assert folder is not None
        try:
            resolve_text_rules(recipe, folder)
        except InputError as error:
            yield from error_findings(("data",), error)


@skip_if_invalid("task", "model", *_TEXT_KEYS)
def check_prompts(context: CheckContext) -> Iterator[Finding]:
    """Check that the prompt template fits the samples that were read."""
    recipe, folder = context.recipe, context.model_folder
    if not isinstance(recipe.model, str):
        folder = recipe.base / recipe.model.config
    if folder is None:
        return
    try:
        yield from prompt_errors(recipe, folder, context.splits)
    except InputError:  # of the template itself; `check_text_rules` reports it
        return


@skip_if_invalid("task")
def resolve_embedder(context: CheckContext) -> Iterator[Finding]:
    """Check an embedder's folder and metrics, as far as they are available, and set its default metrics."""
    recipe, folder = context.recipe, context.model_folder
    if recipe.traits.output != "embedding":
        return
    if folder is not None and not context.is_invalid("model", "embedding"):
        try:
            for message in resolve_pooling(recipe, folder)[1]:
                yield (), message
        except InputError as error:
            yield from error_findings(("model",), error)
    if "test" not in context.splits or context.is_invalid("score.quality"):
        return
    yield from embedder_errors(recipe, context.splits)
    metrics = metrics_of_samples(recipe, context.splits["test"])
    score = recipe.score.model_copy(update={"quality": metrics})
    context.recipe = recipe.model_copy(update={"score": score})


def start_config(context: CheckContext) -> Mapping[str, Any] | None:
    """Return the config that a recipe starts from; None if it cannot be read or is not downloaded yet."""
    model = context.recipe.model
    if isinstance(model, UntrainedModel):
        config, problems = read_untrained_config(config_file(model, context.recipe.base))
    elif context.model_folder is not None:
        config, problems = read_config(context.model_folder)
    else:
        return None
    return None if problems else config


def check_model_configs(context: CheckContext) -> Iterator[Finding]:
    """Propagate the model's config through the tree of steps, and check that every step fits its input."""
    config = start_config(context)
    if config is None:
        return
    if context.model_folder is not None:
        quantization = inspect_quantization(context.model_folder, config)
        for name, message in [
            *prequantized_errors(context.steps, quantization),
            *qat_errors(context.steps, quantization),
        ]:
            yield context.setting_path(name), message
        if quantization is not None and no_blocks_reason(config) is not None:
            config = {**config, QUANTIZED_CONVOLUTIONS_KEY: True}
    config = planned_classifier(context, config)
    configs: dict[str, Mapping[str, Any]] = {MODEL_STEP: config}
    for step in context.steps:
        parent_config = configs.get(step.parent)
        if parent_config is None:
            continue
        errors, step_config = step.stage_class.check_model(step.settings, parent_config)
        if not errors and not step.invalid_settings:
            references = step.settings.step_references().items()
            teachers = {setting: configs[name] for setting, name in references if name in configs}
            errors = step.stage_class.check_teachers(step.settings, step_config, teachers)
        yield from context.setting_findings(step, errors)
        # with invalid settings the output config is unknown, unless the stage does not change it
        if step_config is parent_config or not step.invalid_settings:
            configs[step.name] = step_config


def check_sizes(context: CheckContext) -> Iterator[Finding]:
    """Check the steps on the original model against its numbers of weights."""
    config, folder = start_config(context), context.model_folder
    if config is None or folder is None or context.start_format == "onnx":
        return
    if not has_weights(folder) or (folder / "structure.json").exists():
        return
    try:
        size = read_model_size(folder, config)
    except InputError:  # reported by the checks of the model's folder
        return
    if size is None or not size.is_complete:
        return
    for step in context.steps:
        if step.parent == MODEL_STEP:
            yield from context.setting_findings(step, step.stage_class.check_size(step.settings, size))


def check_window_length(context: CheckContext) -> Iterator[Finding]:
    """Check that windows are not longer than the model's number of positions."""
    length = context.recipe.data.windows.length
    limit = position_limit(start_config(context) or {})
    if length is not None and limit is not None and length > limit:
        text = f"{length} exceeds the model's limit of {limit} tokens. Set {limit} or less."
        yield ("data", "windows", "length"), error_message("window-too-long", text)


@skip_if_invalid("task")
def check_default_windows(context: CheckContext) -> Iterator[Finding]:
    """Check that windows of the default length, which follows from the model, fit the settings of stages."""
    data, config = context.recipe.data, start_config(context)
    if context.recipe.traits.samples != "running-text" or data.windows.length is not None or not config:
        return
    limit = max_tokens(context.model_folder, config, context.recipe.task)
    if limit is None:
        return
    windows = data.windows.model_copy(update={"length": window_length(None, limit)})
    splits = {name: replace(split, windows=windows) for name, split in context.splits.items()}
    for step in context.steps:
        errors = step.stage_class.check_rows(step.settings, context.recipe.task, splits)
        yield from context.setting_findings(step, [e for e in errors if e.code == "window-too-long"])


# Checks that fill the context, each from what those before it have read.
READERS: tuple[Check, ...] = (
    read_steps,
    set_engine_sizes,
    set_autotune_sizes,
    select_steps,
    plan_gates,
    read_user_module,
    read_onnx_model,
    read_model_folder,
    read_data,
    resolve_classifier,
    resolve_embedder,
)
# Checks of what was read, in any order: none changes the context.
CHECKS: tuple[Check, ...] = (
    check_latency_steps,
    check_compiled_baseline,
    check_compiled_trainings,
    check_baseline,
    check_text_rules,
    check_untrained,
    check_new_classifier,
    check_model_configs,
    check_teacher_tokenizers,
    check_sizes,
    check_generation_engines,
    check_float_weights,
    check_graph_settings,
    check_window_length,
    check_default_windows,
    check_metrics,
    check_prompts,
    check_device,
    check_launch,
    check_trackers,
    check_folds,
    check_stage_data,
    check_stage_metrics,
)


def advise(context: CheckContext) -> Iterator[Finding]:
    """Yield warnings and notes about a valid recipe."""
    for message in (*_warnings(context), *_notes(context)):
        yield (), message


def _warnings(context: CheckContext) -> Iterator[Message]:
    recipe, folder, steps = context.recipe, context.model_folder, context.included_steps
    yield from lost_work_warnings(context.drafts)
    yield from launch_warnings(recipe)
    yield from agreement_warnings(recipe)
    yield from last_checkpoint_warnings(recipe, steps)
    yield from data_warnings(recipe, any(step.trains for step in steps), context.splits)
    yield from decoding_warnings(recipe, folder) if folder else ()
    if context.start_format == "onnx":
        return
    config, quantization = _start_weights(context)
    yield from quantization_lost_warnings(steps, config)
    is_float = isinstance(recipe.model, UntrainedModel) or (folder is not None and not quantization)
    yield from idle_autotune_warnings(steps, is_float)


def _start_weights(context: CheckContext) -> tuple[Mapping[str, Any], QuantizedModelInfo | None]:
    """Return the config of the original model, empty if not available, and its quantized weights."""
    if context.model_folder is None or context.start_format == "onnx":
        return {}, None
    config, _ = read_config(context.model_folder)
    return config, inspect_quantization(context.model_folder, config)


def _notes(context: CheckContext) -> Iterator[Message]:
    steps = context.included_steps
    _, quantization = _start_weights(context)
    config = start_config(context) if context.start_format == "torch" else None
    yield from default_rate_notes(steps, config or {}, quantization)
    yield from unsuitable_method_notes(steps)
    yield from torch_only_notes(steps)
    yield from simulated_activation_notes(steps)
    yield from compiled_training_notes(steps)
    yield from custom_metric_notes(context.recipe)


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
    rate_texts = []
    schemes_by_step: dict[str, tuple[str, ...]] = (
        {MODEL_STEP: tuple(quantization.schemes) if quantization else ()} if config else {}
    )
    configs = {MODEL_STEP: config}
    for step in steps:
        settings: Any = step.settings
        if step.parent not in schemes_by_step or settings.replaces_model:
            continue
        if "width" in getattr(settings, "targets", ()):
            continue
        schemes, parent_config = schemes_by_step[step.parent], configs[step.parent]
        schemes_by_step[step.name] = tuple(settings.used_schemes()) if step.stage == "quantize" else schemes
        configs[step.name] = updated = step.stage_class.check_model(settings, parent_config)[1]
        if isinstance(settings, TrainingSettings) and _has_default_rate(settings):
            rate_texts.append(
                f"{step.name} {_rate_text(settings, updated, schemes, has_fewer_layers(updated, config))}"
            )
    if rate_texts:
        yield info("default-learning-rate", f"default learning rates: {'; '.join(rate_texts)}")


def _has_default_rate(settings: Any) -> bool:
    """Return whether a training, or one of its phases, has no learning rate of its own."""
    return any(
        phase.learning_rate is None for phase in getattr(settings, "phase_settings", lambda: [settings])()
    )


def _rate_text(settings: Any, config: Mapping[str, Any], codes: tuple[str, ...], lost: bool) -> str:
    """Return the default rates of one training as text. lost: whether layers were removed."""
    trained_part: TrainedPart = "weights"
    if settings.lora is not None:
        trained_part = "adapters"
    elif lost:
        trained_part = "fewer layers"
    rate = f"{default_learning_rate(config, trained_part):.2g}"
    low_bit_schemes = [
        name for name in codes if SCHEMES[name].requires_training or 0 < SCHEMES[name].bits < 4
    ]
    if trained_part == "adapters" or not low_bit_schemes:
        return f"{rate} ({trained_part})"
    low_bit_rate = f"{default_learning_rate(config, 'few bits'):.2g}"
    if len(low_bit_schemes) == len(codes):
        return f"{low_bit_rate} (few bits)"
    return f"{low_bit_rate} if most weights have fewer than four bits, else {rate}"


def unsuitable_method_notes(steps: Sequence[PlanStep]) -> Iterator[Message]:
    """Yield a note for each step whose method does not suit its scheme; the run warns about it again.

    Steps with `mixed_precision` are skipped: their bit widths are chosen during the run.
    """
    for step in steps:
        settings: Any = step.settings
        if getattr(settings, "method", None) == "hqq" and getattr(settings, "mixed_precision", None) is None:
            for message in two_bit_warnings(settings.used_schemes()):
                yield replace(message, severity="info", step=step.name)


def torch_only_notes(steps: Sequence[PlanStep]) -> Iterator[Message]:
    """Yield a note for each step that quantizes to a scheme which no target supports.

    What is trained on such weights, such as adapters, then runs in torch only.
    """
    for step in steps:
        quantized = step.settings
        if not isinstance(quantized, QuantizeSettings):
            continue
        schemes = [SCHEMES[name] for name in quantized.used_schemes()]
        without_target = [scheme.name for scheme in schemes if not supported_targets([scheme])]
        if without_target:
            text = (
                f"{', '.join(without_target)} is not exported to any runtime: this step and what is trained"
                " on it run in torch only. For an exported model use int8-dynamic, or bnb-nf4 for ort-cpu."
            )
            yield replace(info("torch-only", text), step=step.name)


def simulated_activation_notes(steps: Sequence[PlanStep]) -> Iterator[Message]:
    """Yield a note for each step whose activations are rounded without an operator of so few bits."""
    for step in steps:
        quantized = step.settings
        if isinstance(quantized, QuantizeSettings):
            options = {name: quantized.scheme_options(name) for name in quantized.used_schemes()}
            for message in simulated_activation_warnings(options):
                yield replace(message, severity="info", step=step.name)


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
    recipe, errors, invalid_paths = check_recipe(document, path, overrides)
    start_format: Format = "onnx" if is_onnx(recipe.model, recipe.base) else "torch"
    context = CheckContext(recipe, errors, invalid_paths, start_format, until)
    for check in (*READERS, *CHECKS):
        context.run(check)
    errors.raise_if_any()
    context.run(advise)
    return Plan(
        recipe=context.recipe,
        steps=context.included_steps,
        gates=context.gates,
        local_model=context.model_folder,
        splits=context.splits,
        warnings=tuple(context.warnings),
        notes=tuple(context.notes),
        until=until,
        excluded_steps=tuple(step for step in context.steps if step.name not in context.included_names),
        step_order=tuple(step.name for step in context.steps),
        judged_on=choose_judging_split(context),
        problem_type=context.problem_type,
        onnx_model=context.onnx_model,
    )
