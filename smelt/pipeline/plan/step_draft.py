"""A step of a recipe while it is checked, and checks of a step against the steps before it.

A step must not invalidate results of earlier steps, as declared by the stages. Its target runtime must
support the output of the steps before it. An export with `autotune` that has no operators to choose from gets
a warning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from smelt.core.artifact import Format
from smelt.core.messages import Message, error_message, warning
from smelt.pipeline.plan.plan import PlanStep
from smelt.pipeline.recipe.stages import MODEL_STEP, StageEntry
from smelt.pipeline.recipe.validation_errors import Finding
from smelt.quantization.scheme import EXPORT_TARGETS, Scheme, SchemeOptions
from smelt.quantization.schemes.registry import (
    DEFAULT_SCHEME,
    SCHEMES,
    SCHEMES_BY_BITS,
    STATIC_SCHEME,
    bits_per_weight,
    schemes_for_target,
    supported_dtypes,
    unsupported_reason,
    unsupported_scheme_options,
)
from smelt.stage import Need, Settings, Stage

# A step: its name, its stage and its settings.
StepSpec = tuple[str, type[Stage[Any]], Settings]


def results_of(step: StepSpec) -> frozenset[str]:
    """Return the results of a step that later steps may invalidate."""
    _, stage, settings = step
    return stage.provides(settings)


def lost_results(
    step: StepSpec, above: Sequence[StepSpec], below: Collection[StepSpec]
) -> list[tuple[str, str]]:
    """Return code and text for each result of earlier steps that `step` invalidates.

    A result that a later step creates again is not lost.

    Args:
        step: the step to check.
        above: its ancestors, nearest first.
        below: its descendants.
    """
    _, stage, settings = step
    recomputed = {result_name for later_step in below for result_name in results_of(later_step)}
    losses = []
    for result_name, text in stage.invalidates(settings).items():
        source_step = next(
            (earlier_step for earlier_step in above if result_name in results_of(earlier_step)), None
        )
        if source_step is not None and result_name not in recomputed:
            losses.append((f"{result_name}-lost", text.format(step=source_step[0]) + "."))
    return losses


@dataclass
class StepDraft:
    """A step while its recipe is checked.

    settings: None if they are not a mapping; invalid ones have their defaults and are listed in
    `invalid_settings`, so that checks can skip them.
    """

    entry: StageEntry
    name: str
    parent: str | None
    stage_class: type[Stage[Any]] | None = None
    settings: Settings | None = None
    invalid_settings: frozenset[str] = frozenset()
    unavailable: str | None = None
    unscored: str | None = None
    needs: frozenset[Need] = frozenset()

    @property
    def format(self) -> Format | None:
        """Output format of the step; None if unknown."""
        return self.stage_class.produces if self.stage_class else None

    @property
    def references(self) -> dict[str, str]:
        """The steps that its settings name, by setting."""
        references = self.settings.step_references() if self.settings else {}
        return {
            setting: name
            for setting, name in references.items()
            if setting.split(".")[0] not in self.invalid_settings
        }

    @property
    def target(self) -> str | None:
        """The runtime that the step exports to; None if it has none, or unknown."""
        return None if "target" in self.invalid_settings else getattr(self.settings, "target", None)


def step_spec(draft: StepDraft) -> StepSpec | None:
    """Return a step in the form for `lost_results`; None if its settings are unknown."""
    if draft.stage_class is None or draft.settings is None:
        return None
    return draft.name, draft.stage_class, draft.settings


def scheme_text(draft: StepDraft) -> str:
    """Return the scheme of a quantize step, or `quantized` if unknown."""
    if not _are_settings_valid(draft, {"scheme", "mixed_precision"}):
        return "quantized"
    settings: Any = draft.settings
    return " and ".join(getattr(settings, "linear_schemes", None) or (str(settings.scheme),))


def _are_settings_valid(quantized: StepDraft, names: set[str]) -> bool:
    """Return whether the settings `names` of a step are valid: no errors, and no misspelled setting."""
    settings = quantized.settings
    if settings is None or quantized.invalid_settings & names:
        return False
    setting_names = type(settings).model_fields
    return bool(settings.model_fields_set & {"scheme", "mixed_precision"}) or all(
        setting in setting_names for setting in quantized.invalid_settings
    )


def quantization_schemes(quantized: StepDraft) -> tuple[Scheme, ...] | None:
    """Return the schemes of a quantize step, that of the linear layers first; None if unknown.

    They are unknown if the settings that choose them have errors.
    """
    if not _are_settings_valid(quantized, {"scheme", "embedding_scheme", "mixed_precision"}):
        return None
    return tuple(SCHEMES[name] for name in cast("Any", quantized.settings).used_schemes())


def unsupported_layers(quantized: StepDraft, target: str) -> str | None:
    """Return the quantized layers of a step that `target` does not support; None if it supports all."""
    if (schemes := quantization_schemes(quantized)) is None:
        all_refuse = all(unsupported_reason(scheme, target) for scheme in SCHEMES.values())
        return "quantized layers" if all_refuse else None
    return (
        " and ".join(scheme.exported_as for scheme in schemes if unsupported_reason(scheme, target)) or None
    )


def supported_bit_widths(quantized: StepDraft, target: str) -> dict[int, float]:
    """Return the bit widths of a mixed-precision step that `target` supports, with bits per weight.

    Empty if none is supported, or if the step has a single scheme.
    """
    settings: Any = quantized.settings
    if getattr(settings, "mixed_precision", None) is None:
        return {}
    schemes = {
        width: (scheme, settings.scheme_options(scheme.name))
        for width, scheme in sorted(SCHEMES_BY_BITS.items())
    }
    return {
        width: bits_per_weight(scheme, options)
        for width, (scheme, options) in schemes.items()
        if not unsupported_reason(scheme, target) and not unsupported_scheme_options(scheme, options, target)
    }


def unsupported_options(quantized: StepDraft, target: str) -> str | None:
    """Return a scheme of a quantize step with the options that `target` requires instead; None if it fits."""
    settings: Any = quantized.settings
    for scheme in quantization_schemes(quantized) or ():
        options = settings.scheme_options(scheme.name)
        valid_options = {
            name: value for name, value in options.items() if name not in quantized.invalid_settings
        }
        if required_options := unsupported_scheme_options(scheme, valid_options, target):
            return f"{scheme.name} with {' and '.join(required_options)}"
    return None


def lost_precision(quantized: StepDraft, settings: Any) -> str | None:
    """Return the dtypes that a quantize step allows for export, if `settings` ask for another; else None."""
    schemes = quantization_schemes(quantized)
    if schemes is None or settings is None:
        return None
    dtypes = supported_dtypes(schemes, settings.target)
    # OpenVINO converts a file in fp32 to bf16
    return None if settings.target == "openvino" or settings.dtype in dtypes else " or ".join(dtypes)


def to_plan_step(draft: StepDraft) -> PlanStep | None:
    """Return the step of a complete draft; else None."""
    if draft.stage_class is None or draft.settings is None or draft.parent is None:
        return None
    entry = draft.entry
    return PlanStep(
        draft.name,
        entry.stage,
        draft.stage_class,
        draft.settings,
        draft.parent,
        entry.optional,
        entry.line,
        draft.unavailable,
        draft.unscored,
        draft.invalid_settings,
        draft.needs,
    )


# names of the targets of `onnx` in messages
RUNTIME_NAMES = {
    "ort-cpu": "ONNX Runtime",
    "ort-cuda": "ONNX Runtime on CUDA",
    "tensorrt": "TensorRT",
    "openvino": "OpenVINO",
    "ort-tensorrt": "TensorRT in ONNX Runtime",
}


def target_errors(
    draft: StepDraft, parent: StepDraft | None, quantized: StepDraft | None, start_format: Format
) -> Iterator[Finding]:
    """Yield errors if a step's target does not support the quantized weights or the graphs of its parent.

    Args:
        draft: the step.
        parent: its parent step; None for the original model.
        quantized: the nearest earlier step that quantized the model.
        start_format: the format of the original model.
    """
    if draft.entry.stage == "onnx" and draft.target is not None and quantized:
        yield from _quantization_errors(draft, draft.target, quantized)
    if draft.entry.stage != "tensorrt" or parent is None or parent.target in (None, "tensorrt"):
        return
    if start_format == "onnx":
        text = (
            f"tensorrt needs symmetric int8, but '{parent.name}' has target {parent.target}. Use"
            f" `{parent.entry.stage}: {{scheme: {STATIC_SCHEME}, target: tensorrt}}`."
        )
        yield draft.entry.path, error_message("unsupported-scheme", text)
    else:
        text = (
            f"tensorrt needs a graph with target tensorrt, but '{parent.name}' has target {parent.target}."
            " Add `- onnx: {target: tensorrt}` before it, or set `from:` to such a step."
        )
        yield draft.entry.path, error_message("wrong-target", text)


def _quantization_errors(draft: StepDraft, target: str, quantized: StepDraft) -> Iterator[Finding]:
    """Yield an error if a target does not support the schemes of `quantized`, their options or the dtype."""
    runtime, base = RUNTIME_NAMES[target], f"`from: {quantized.parent or MODEL_STEP}`"
    if layers := unsupported_layers(quantized, target):
        targets = " or ".join(name for name in EXPORT_TARGETS if unsupported_layers(quantized, name) is None)
        fixes = [f"target: {targets}"] if targets else []
        fixes += _supported_width_settings(quantized, target) + _supported_scheme_settings(quantized, target)
        text = f"{runtime} cannot run the {layers} of '{quantized.name}'. Use {', or '.join([base, *fixes])}."
        yield (*draft.entry.path, "target"), error_message("unsupported-scheme", text)
    elif options := unsupported_options(quantized, target):
        text = f"{runtime} supports only {options}. Set these options in '{quantized.name}', or use {base}."
        yield (*draft.entry.path, "target"), error_message("unsupported-options", text)
    elif "dtype" not in draft.invalid_settings and (dtypes := lost_precision(quantized, draft.settings)):
        text = f"the scales of '{quantized.name}' would lose precision in this dtype. Set dtype: {dtypes}."
        yield (*draft.entry.path, "dtype"), error_message("low-precision-scales", text)


def _supported_width_settings(quantized: StepDraft, target: str) -> list[str]:
    """Return the settings with which `target` supports a mixed-precision step; empty if there are none."""
    runs = supported_bit_widths(quantized, target)
    if len(runs) < 2:
        return []
    budget = cast("Any", quantized.settings).mixed_precision.target_bits
    min_bits, max_bits = min(runs.values()), max(runs.values())
    budget_text = (
        ""
        if budget is None or min_bits <= budget < max_bits
        else f" and target_bits between {min_bits:g} and {max_bits:g}"
    )
    return [f"'{quantized.name}' `mixed_precision: {{bit_widths: {[*runs]}}}`{budget_text}"]


def _supported_scheme_settings(quantized: StepDraft, target: str) -> list[str]:
    """Return the settings with schemes that `target` supports; empty if there are none.

    If it supports the scheme of the linear layers, only embedding schemes are returned.
    """
    settings: Any = quantized.settings
    schemes = schemes_for_target(target)
    if not schemes or quantization_schemes(quantized) is None:
        return []
    if settings.mixed_precision is not None:
        return [f"quantize with {' or '.join(schemes)} in place of mixed_precision"]
    if set(settings.linear_schemes) <= set(schemes):
        tables = [name for name in schemes if SCHEMES[name].supports_embeddings]
        return [f"'{quantized.name}' `embedding_scheme: {' or '.join(tables)}`"]
    is_embedding_set = settings.embedding_scheme is not None and settings.embedding_scheme not in schemes
    return [
        f"quantize with {' or '.join(schemes)}{', without `embedding_scheme`' if is_embedding_set else ''}"
    ]


def shortlist_scheme_errors(draft: StepDraft, quantized: StepDraft | None) -> Iterator[Finding]:
    """Yield an error if the output layer's scheme does not allow a shortlist, which reads only some rows."""
    export_settings: Any = draft.settings
    if (
        quantized is None
        or export_settings is None
        or not export_settings.generation_graph
        or draft.target != "ort-cpu"
    ):
        return
    settings: Any = quantized.settings
    if quantization_schemes(quantized) is None or not settings.quantizes_output_layer:
        return
    scheme = SCHEMES[settings.resolved_embedding_scheme]
    if not scheme.supports_shortlist:
        text = (
            f"a shortlist does not support an output layer quantized with {scheme.name}. Set in"
            f" '{quantized.name}' `embedding_scheme: {DEFAULT_SCHEME}`, or in this step `generation_graph:"
            " false`."
        )
        yield draft.entry.path, error_message("unsupported-scheme", text)


def idle_autotune_warnings(steps: Sequence[PlanStep], has_float_weights: bool) -> Iterator[Message]:
    """Yield a warning for each step whose `autotune` has nothing to choose from.

    Args:
        steps: steps of the plan, parents first.
        has_float_weights: whether the original model is known to have no quantized weights.
    """
    quantized_by_step: dict[str, tuple[str, Mapping[str, SchemeOptions]]] = {}
    unknown = set() if has_float_weights else {MODEL_STEP}
    for step in steps:
        settings: Any = step.settings
        if step.stage == "quantize":
            quantized_by_step[step.name] = (
                step.name,
                {name: settings.scheme_options(name) for name in settings.used_schemes()},
            )
        elif not settings.replaces_model:
            unknown |= {step.name} if step.parent in unknown else set()
            quantized_by_step |= (
                {step.name: quantized_by_step[step.parent]} if step.parent in quantized_by_step else {}
            )
        tunes = (
            step.stage == "onnx"
            and getattr(settings, "autotune", False)
            and "autotune" not in step.invalid_settings
        )
        if not tunes or step.name in unknown:
            continue
        location: Any = {"step": step.name, "setting": "autotune", "line": step.line}
        if step.name not in quantized_by_step:
            yield warning(
                "nothing-quantized",
                "autotune selects operators for quantized layers, but no earlier step quantizes the model."
                " Remove autotune, or put `quantize` before it.",
                **location,
            )
            continue
        source, schemes = quantized_by_step[step.name]
        if all(len(SCHEMES[name].operator_variants(options)) < 2 for name, options in schemes.items()):
            yield warning(
                "nothing-to-tune",
                f"autotune has no effect: layers quantized with {' and '.join(schemes)} by '{source}' can be"
                " exported as one operator only. Remove autotune.",
                **location,
            )
