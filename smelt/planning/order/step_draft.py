"""A step of a recipe while it is checked, and the properties that other checks need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from smelt.core.artifact import Format
from smelt.core.stage import Need, Settings, Stage
from smelt.planning.order.lost_work import StepSpec
from smelt.planning.plan import PlanStep
from smelt.recipe.stages import StageEntry
from smelt.runtime.schemes.registry import (
    SCHEMES,
    SCHEMES_BY_BITS,
    bits_per_weight,
    supported_dtypes,
    unsupported_reason,
    unsupported_scheme_options,
)
from smelt.runtime.schemes.scheme import Scheme


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
        found = self.settings.step_references() if self.settings else {}
        return {
            setting: name
            for setting, name in found.items()
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
    if getattr(draft.settings, "mixed_precision", None) is not None:
        return " and ".join(cast(Any, draft.settings).used_schemes())
    return str(cast(Any, draft.settings).scheme)


def _are_settings_valid(quantized: StepDraft, names: set[str]) -> bool:
    """Return whether the settings `names` of a step are valid: no mistakes, and no misspelt setting."""
    settings = quantized.settings
    if settings is None or quantized.invalid_settings & names:
        return False
    known = type(settings).model_fields
    return bool(settings.model_fields_set & {"scheme", "mixed_precision"}) or all(
        word in known for word in quantized.invalid_settings
    )


def quantization_schemes(quantized: StepDraft) -> tuple[Scheme, ...] | None:
    """Return the schemes of a quantize step, that of the linear layers first; None if unknown.

    They are unknown if the settings that choose them have mistakes.
    """
    if not _are_settings_valid(quantized, {"scheme", "embedding_scheme", "mixed_precision"}):
        return None
    return tuple(SCHEMES[name] for name in cast(Any, quantized.settings).used_schemes())


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
    made = {
        width: (scheme, settings.scheme_options(scheme.name))
        for width, scheme in sorted(SCHEMES_BY_BITS.items())
    }
    return {
        width: bits_per_weight(scheme, options)
        for width, (scheme, options) in made.items()
        if not unsupported_reason(scheme, target) and not unsupported_scheme_options(scheme, options, target)
    }


def unsupported_options(quantized: StepDraft, target: str) -> str | None:
    """Return a scheme of a quantize step with the options that `target` requires instead; None if it fits."""
    settings: Any = quantized.settings
    for scheme in quantization_schemes(quantized) or ():
        options = settings.scheme_options(scheme.name)
        known = {name: value for name, value in options.items() if name not in quantized.invalid_settings}
        if wanted := unsupported_scheme_options(scheme, known, target):
            return f"{scheme.name} with {' and '.join(wanted)}"
    return None


def lost_precision(quantized: StepDraft, settings: Any) -> str | None:
    """Return the dtypes that a quantize step allows for export, if `settings` ask for another; else None."""
    schemes = quantization_schemes(quantized)
    if schemes is None or settings is None:
        return None
    fit = supported_dtypes(schemes, settings.target)
    # OpenVINO converts a file in fp32 to bf16
    return None if settings.target == "openvino" or settings.dtype in fit else " or ".join(fit)


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
