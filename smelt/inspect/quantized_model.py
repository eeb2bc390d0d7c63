"""Detect quantized weights of a model before any stage: a third-party checkpoint or a smelt artifact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import load_json
from smelt.runtime.models.quantized_checkpoint.quantization_config import parse_quantization_config
from smelt.runtime.schemes.registry import (
    CHECKPOINT_SCHEME,
    SCHEMES,
    default_options,
    unsupported_reason,
    unsupported_scheme_options,
)
from smelt.runtime.schemes.scheme import EXPORT_TARGETS, SchemeOptions


@dataclass(frozen=True)
class QuantizedModelInfo:
    """Quantized weights of a model before any stage.

    description: name of the format. schemes: options by scheme, the most frequent scheme first. float_source:
    the model to start from if float weights are needed.
    """

    description: str
    schemes: Mapping[str, SchemeOptions]
    float_source: str

    def unsupported_by(self, target: str) -> str | None:
        """Return the quantized layers that `target` does not support; None if it supports all."""
        known = ((SCHEMES[name], options) for name, options in self.schemes.items())
        words = [
            one.exported_as
            for one, own in known
            if unsupported_reason(one, target) or unsupported_scheme_options(one, own, target)
        ]
        return " and ".join(words) or None

    @property
    def targets(self) -> list[str]:
        """The export targets that support these weights."""
        return [target for target in EXPORT_TARGETS if self.unsupported_by(target) is None]


def inspect_quantization(folder: Path, config: Mapping[str, Any]) -> QuantizedModelInfo | None:
    """Return the quantized weights of the model in `folder`; None for float or unreadable weights.

    config: its Hugging Face config.
    """
    try:
        coding = parse_quantization_config(config)
    except InputError:  # reported by the checks of the model's folder
        return None
    if coding is not None:
        taken = {CHECKPOINT_SCHEME: default_options(SCHEMES[CHECKPOINT_SCHEME])}
        return QuantizedModelInfo(coding.method, taken, "the float model")
    found = list(_quantized_matrices(folder))
    counted = Counter(name for name, _ in found)
    options = dict(found)
    schemes = {name: options[name] for name, _ in counted.most_common()}
    again = "an artifact from before `quantize`"
    return QuantizedModelInfo(" and ".join(schemes), schemes, again) if schemes else None


def _quantized_matrices(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield scheme and options of each matrix that smelt has quantized."""
    try:
        edits = load_json(folder / "structure.json")["edits"]
        coded = [edit for edit in edits if edit["op"] == "quantize"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # not an artifact; an invalid file is reported when the model is loaded
    for edit in coded:
        if edit.get("scheme") in SCHEMES:
            options = {name: value for name, value in edit.items() if name not in ("op", "module", "scheme")}
            yield str(edit["scheme"]), options
