"""Check steps after a model with quantized weights, from a checkpoint (GPTQ, AWQ) or from `quantize`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smelt.compress.model_input import AFTER_QUANTIZE, COMPILED_QUANTIZED, TRAINING_BEFORE_QUANTIZE
from smelt.core.messages import Message, error_message, warning
from smelt.models.quantization_config import parse_quantization_config
from smelt.pipeline.inspect.model_info import QuantizedModelInfo
from smelt.pipeline.plan.plan import PlanStep
from smelt.pipeline.plan.step_draft import RUNTIME_NAMES
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.quantization.schemes.registry import SCHEMES
from smelt.stage import QuantizedInput


def prequantized_errors(
    steps: Sequence[PlanStep], quantization: QuantizedModelInfo | None
) -> Iterator[tuple[str, Message]]:
    """Yield (step, error) for steps that need float weights, or whose target lacks the scheme.

    Args:
        steps: steps of the plan, parents first.
        quantization: quantized weights of the original model; None for floats.
    """
    if quantization is None:
        return
    quantized_steps = {MODEL_STEP}
    problem = f"needs float weights, but the model's weights are quantized ({quantization.description})"
    for step in steps:
        if step.parent not in quantized_steps:
            continue
        if step.stage != "distill":  # its student may be another model
            quantized_steps.add(step.name)
        target = getattr(step.settings, "target", None)
        if step.stage_class.needs_float:
            text = f"{step.stage} {problem}. Start from {quantization.float_source}."
            yield step.name, error_message("already-quantized", text)
        elif zeros := next((n for n in TRAINING_BEFORE_QUANTIZE if getattr(step.settings, n, None)), None):
            text = f"{zeros} {problem}. Remove {zeros}, or start from {quantization.float_source}."
            yield step.name, error_message(AFTER_QUANTIZE, text)
        elif step.stage == "onnx" and target and (unsupported := quantization.unsupported_by(str(target))):
            options = [f"target: {' or '.join(quantization.targets)}"] if quantization.targets else []
            text = (
                f"{RUNTIME_NAMES[str(target)]} cannot run the {unsupported} of the model"
                f" ({quantization.description}). Use {', or '.join([*options, quantization.float_source])}."
            )
            yield step.name, error_message("unsupported-scheme", text)


def quantization_lost_warnings(steps: Sequence[PlanStep], config: Mapping[str, Any]) -> Iterator[Message]:
    """Yield a warning for each step that recomputes the quantized weights of the checkpoint.

    Args:
        steps: steps of the plan, parents first.
        config: config of the original model with quantized weights.
    """
    if (stored := parse_quantization_config(config)) is None:
        return
    quantized_steps = {MODEL_STEP}
    for step in steps:
        settings: Any = step.settings
        if step.parent not in quantized_steps or settings.replaces_model:
            continue
        has_learned_scales = getattr(getattr(settings, "qat", None), "scales", None) == "lsq"
        if settings.changes_quantized_weights and not has_learned_scales:
            yield warning(
                "quantized-weights-lost",
                "Training recomputes the scales and rounds to nearest, so the quantized weights that"
                f" {stored.method} optimized are lost. Use qat: {{scales: lsq}} to start from them, or lora"
                " to keep them.",
                step=step.name,
            )
        else:
            quantized_steps.add(step.name)


@dataclass(frozen=True)
class _QuantizationState:
    """The quantized weights after a step.

    linear_scheme: scheme of the linear layers.
    schemes: all schemes; () if unknown.
    split_obstacle: code and text of why the layers cannot be split, with what to do; None if they can.
    is_split: whether layers were split in two by weight splitting.
    has_float_layers: whether patterns exclude some layers from quantization.
    has_low_rank: whether layers have a low-rank correction or adapters.
    """

    linear_scheme: str
    schemes: tuple[str, ...]
    split_obstacle: tuple[str, str] | None = None
    is_split: bool = False
    has_float_layers: bool = False
    has_low_rank: bool = False


def qat_errors(
    steps: Sequence[PlanStep], quantization: QuantizedModelInfo | None
) -> Iterator[tuple[str, Message]]:
    """Yield (step, error) for training settings that do not fit the quantized weights.

    Args:
        steps: steps of the plan, parents first.
        quantization: quantized weights of the original model; None for floats.
    """
    states = {}
    if quantization is not None:
        scheme_names = tuple(quantization.schemes)
        states[MODEL_STEP] = _QuantizationState(scheme_names[0], scheme_names)
    valid_steps = {MODEL_STEP}  # steps after an invalid one are skipped: their quantized weights are unknown
    for step in steps:
        settings: Any = step.settings
        if step.stage == "quantize":
            if not step.invalid_settings:
                valid_steps.add(step.name)
                states[step.name] = _state_after_quantize(settings)
            continue
        if step.parent not in valid_steps:
            continue
        valid_steps.add(step.name)
        qat = getattr(settings, "qat", None)
        replaces_model = settings.replaces_model
        parent_state = None if replaces_model else states.get(step.parent)
        if parent_state is not None:
            for message in _qat_conflicts(settings, parent_state):
                yield step.name, message
            problem = step.stage_class.quantized_input_error(settings, _stage_view(parent_state))
            if problem is not None:
                yield step.name, error_message(AFTER_QUANTIZE, problem)
            states[step.name] = _state_after_step(settings, parent_state)
        elif qat is not None:
            text = "qat trains a quantized model, but no earlier step quantizes it. Put `quantize` before it,"
            yield step.name, error_message("not-quantized", f"{text} or remove qat.")


def _stage_view(before: _QuantizationState) -> QuantizedInput:
    """Return the quantized input of the linear layers in the form that stages check."""
    schemes = tuple(name for name in before.schemes if name in before.linear_scheme.split(" and "))
    return QuantizedInput(schemes, before.has_low_rank, before.is_split)


def _state_after_quantize(quantize: Any) -> _QuantizationState:
    """Return the state after `quantize`, or after `quantize-onnx`, which has other settings."""
    list_schemes = getattr(quantize, "used_schemes", None)
    scheme_names = list_schemes() if list_schemes is not None else ()
    layers = " and ".join(getattr(quantize, "linear_schemes", ())) or str(getattr(quantize, "scheme", ""))
    split_obstacle = None
    if getattr(quantize, "granularity", None) == "channel":
        split_obstacle = (
            "row-scales-not-splittable",
            "one scale for each channel, but split layers need one for each group. Set granularity: group in"
            " `quantize`.",
        )
    elif getattr(quantize, "correction", None) is not None:
        text = "a low-rank correction, which cannot be split. Remove low_rank_correction."
        split_obstacle = ("low-rank-not-splittable", text)
    pairs = getattr(quantize, "correction", None) is not None
    return _QuantizationState(
        layers,
        scheme_names,
        split_obstacle,
        has_float_layers=bool(getattr(quantize, "exclude", None)),
        has_low_rank=pairs,
    )


def _qat_conflicts(settings: Any, before: _QuantizationState) -> Iterator[Message]:
    """Yield errors for settings of a training step that do not fit its quantized input."""
    qat = getattr(settings, "qat", None)
    halved = [name for name, scheme in SCHEMES.items() if scheme.split_scheme]
    lora = getattr(settings, "lora", None)
    if lora is None and getattr(settings, "torch_compile", False):
        yield error_message("settings-conflict", COMPILED_QUANTIZED)
    if lora is not None and lora.use_dora and not before.has_float_layers:
        text = f"lora: use_dora supports only float layers, and they are {before.linear_scheme}. Remove it."
        yield error_message("unsupported-layer", text)
    if lora is not None and before.is_split and not before.has_float_layers:
        text = (
            "lora: layers that were split by qat: weight_splitting in an earlier step cannot have adapters."
            " Remove lora or weight_splitting."
        )
        yield error_message("lora-on-split-layers", text)
    if qat is None:
        return
    is_learnable = any(SCHEMES[name].learnable_scales for name in before.schemes)
    if qat.scales == "lsq" and before.schemes and not is_learnable:
        text = (
            f"qat: scales: lsq needs learnable scales, but {' and '.join(before.schemes)} has none. Quantize"
            " with another scheme, or remove scales."
        )
        yield error_message("scales-not-learned", text)
    if qat.weight_splitting and before.linear_scheme not in halved:
        text = (
            f"qat: weight_splitting needs layers of scheme {' or '.join(halved)}, but they are"
            f" {before.linear_scheme}. Quantize with scheme: {' or '.join(halved)}, or remove"
            " weight_splitting."
        )
        yield error_message("unsupported-scheme", text)
    elif qat.weight_splitting and before.split_obstacle:
        code, text = before.split_obstacle
        yield error_message(code, f"qat: weight_splitting: the quantized layers have {text}")


def _state_after_step(settings: Any, before: _QuantizationState) -> _QuantizationState:
    """Return the state of the quantized weights after a step."""
    qat = getattr(settings, "qat", None)
    if getattr(settings, "lora", None) is not None:
        text = "adapters, which cannot be split. Remove lora from the earlier step."
        obstacle = ("adapters-not-splittable", text)
        split_obstacle = (
            before.split_obstacle if before.has_float_layers else before.split_obstacle or obstacle
        )
        return replace(before, split_obstacle=split_obstacle, has_low_rank=True)
    if (
        qat is not None
        and qat.weight_splitting
        and before.linear_scheme in SCHEMES
        and not before.split_obstacle
    ):
        halves = SCHEMES[before.linear_scheme].split_scheme
        scheme_names = tuple(halves if name == before.linear_scheme else name for name in before.schemes)
        return (
            replace(before, linear_scheme=halves, schemes=scheme_names, is_split=True) if halves else before
        )
    return before
