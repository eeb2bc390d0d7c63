"""Turn a recipe into a plan, with all checks that need no work; all errors are reported together.

Checked are model, data and device, and, from config and data without torch, that each stage fits its input
model and samples. The plan also reports the default learning rates of training steps, and quantization
methods that do not suit their scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smelt.compress.quantize.settings import two_bit_warnings
from smelt.core.artifact import Format
from smelt.core.messages import Message, info
from smelt.pipeline.inspect.model_folder import read_config
from smelt.pipeline.inspect.model_info import QuantizedModelInfo, inspect_quantization, is_onnx
from smelt.pipeline.plan.check_context import Check, CheckContext
from smelt.pipeline.plan.model_checks import (
    check_model_configs,
    check_prompts,
    check_text_rules,
    check_window_length,
    read_model_folder,
    resolve_embedder,
    start_config,
)
from smelt.pipeline.plan.onnx_models import (
    check_float_weights,
    check_generation_engines,
    read_onnx_model,
)
from smelt.pipeline.plan.plan import Plan, PlanStep
from smelt.pipeline.plan.quantized_steps import quantization_lost_warnings
from smelt.pipeline.plan.run_checks import (
    check_baseline,
    check_device,
    check_folds,
    check_latency_steps,
    check_launch,
    check_metrics,
    check_stage_data,
    check_stage_metrics,
    check_trackers,
    choose_judging_split,
    custom_metric_notes,
    plan_gates,
    read_data,
    select_steps,
)
from smelt.pipeline.plan.step_checks import read_steps, set_engine_lengths
from smelt.pipeline.plan.step_draft import idle_autotune_warnings
from smelt.pipeline.plan.untrained_checks import check_new_classifier, check_untrained, resolve_classifier
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
from smelt.pipeline.recipe.validation_errors import Finding
from smelt.pipeline.recipe.yaml_file import YamlDocument, read_yaml
from smelt.quantization.schemes.registry import SCHEMES
from smelt.training.settings import (
    TrainedPart,
    TrainingSettings,
    default_learning_rate,
    has_fewer_layers,
)

# Checks that fill the context, each from what those before it have read.
READERS: tuple[Check, ...] = (
    read_steps,
    set_engine_lengths,
    select_steps,
    plan_gates,
    read_onnx_model,
    read_model_folder,
    read_data,
    resolve_classifier,
    resolve_embedder,
)
# Checks of what was read, in any order: none changes the context.
CHECKS: tuple[Check, ...] = (
    check_latency_steps,
    check_baseline,
    check_text_rules,
    check_untrained,
    check_new_classifier,
    check_model_configs,
    check_generation_engines,
    check_float_weights,
    check_window_length,
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
