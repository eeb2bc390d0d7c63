"""A step of a recipe as far as it is known, and what other steps ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from smelt.core.artifact import Format
from smelt.core.stage import Need, Settings, Stage
from smelt.planning.order.lost import Done
from smelt.planning.plan import Step
from smelt.recipe.stages import StageEntry
from smelt.runtime.schemes.registry import SCHEMES, WIDTHS, bits_per_weight, precisions_of, refusal, unfit
from smelt.runtime.schemes.scheme import Scheme


@dataclass
class Draft:
    """A step as far as it is known.

    settings: None where they are no settings at all; wrong ones have their defaults there, and stand in
    `wrong`, so that nothing is concluded from them.
    """

    entry: StageEntry
    name: str
    parent: str | None
    cls: type[Stage[Any]] | None = None
    settings: Settings | None = None
    wrong: frozenset[str] = frozenset()
    unavailable: str | None = None
    unscored: str | None = None
    needs: frozenset[Need] = frozenset()

    @property
    def format(self) -> Format | None:
        """What the step gives, where it is known."""
        return self.cls.produces if self.cls else None

    @property
    def references(self) -> dict[str, str]:
        """The steps that its settings name, by setting."""
        found = self.settings.references() if self.settings else {}
        return {setting: name for setting, name in found.items() if setting.split(".")[0] not in self.wrong}

    @property
    def target(self) -> str | None:
        """The runtime that it is for; None where it is for none, or that is not known."""
        return None if "target" in self.wrong else getattr(self.settings, "target", None)


def done(draft: Draft) -> Done | None:
    """Return a step as `lost_by` knows it; None where its settings are not known."""
    if draft.cls is None or draft.settings is None:
        return None
    return draft.name, draft.cls, draft.settings


def scheme_of(draft: Draft) -> str:
    """Return the scheme of a quantize step, or `quantized` where that is not known."""
    if not _chosen(draft, {"scheme", "mixed_precision"}):
        return "quantized"
    if getattr(draft.settings, "mixed_precision", None) is not None:
        return " and ".join(cast(Any, draft.settings).schemes())
    return str(cast(Any, draft.settings).scheme)


def _chosen(quantized: Draft, words: set[str]) -> bool:
    """Return whether what the settings `words` of a step say was meant: no mistake, and no misspelt word."""
    settings = quantized.settings
    if settings is None or quantized.wrong & words:
        return False
    known = type(settings).model_fields
    return bool(settings.model_fields_set & {"scheme", "mixed_precision"}) or all(
        word in known for word in quantized.wrong
    )


def schemes_of(quantized: Draft) -> tuple[Scheme, ...] | None:
    """Return the schemes of a quantize step, that of the linear layers first; None where nobody knows them.

    Nobody does where what chooses them is a mistake: the defaults in its place are not what was meant.
    """
    if not _chosen(quantized, {"scheme", "embedding_scheme", "mixed_precision"}):
        return None
    return tuple(SCHEMES[name] for name in cast(Any, quantized.settings).schemes())


def refused(quantized: Draft, target: str) -> str | None:
    """Return what of a quantize step no graph for `target` can hold; None where it can hold all."""
    if (schemes := schemes_of(quantized)) is None:
        all_refuse = all(refusal(scheme, target) for scheme in SCHEMES.values())
        return "quantized layers" if all_refuse else None
    return " and ".join(scheme.leaves_as for scheme in schemes if refusal(scheme, target)) or None


def widths_for(quantized: Draft, target: str) -> dict[int, float]:
    """Return the widths of a step of mixed precision that `target` runs, and the bits a weight each takes.

    Empty where none runs, and where the step has one scheme.
    """
    settings: Any = quantized.settings
    if getattr(settings, "mixed_precision", None) is None:
        return {}
    made = {width: (scheme, settings.options(scheme.name)) for width, scheme in sorted(WIDTHS.items())}
    return {
        width: bits_per_weight(scheme, options)
        for width, (scheme, options) in made.items()
        if not refusal(scheme, target) and not unfit(scheme, options, target)
    }


def unfit_options(quantized: Draft, target: str) -> str | None:
    """Return a scheme of a quantize step and which of its options `target` wants otherwise; None: none."""
    settings: Any = quantized.settings
    for scheme in schemes_of(quantized) or ():
        options = settings.options(scheme.name)
        known = {name: value for name, value in options.items() if name not in quantized.wrong}
        if wanted := unfit(scheme, known, target):
            return f"{scheme.name} with {' and '.join(wanted)}"
    return None


def lossy(quantized: Draft, settings: Any) -> str | None:
    """Return the precisions that codes of a quantize step leave a file, where `settings` ask for another."""
    schemes = schemes_of(quantized)
    if schemes is None or settings is None:
        return None
    fit = precisions_of(schemes, settings.target)
    # OpenVINO makes its bf16 of a file in fp32
    return None if settings.target == "openvino" or settings.dtype in fit else " or ".join(fit)


def finished(draft: Draft) -> Step | None:
    """Return the step of a draft that is whole; else None."""
    if draft.cls is None or draft.settings is None or draft.parent is None:
        return None
    entry = draft.entry
    return Step(
        draft.name,
        entry.word,
        draft.cls,
        draft.settings,
        draft.parent,
        entry.optional,
        entry.line,
        draft.unavailable,
        draft.unscored,
        draft.wrong,
        draft.needs,
    )
