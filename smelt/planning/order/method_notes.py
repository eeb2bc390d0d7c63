"""Notes about quantization methods that do not suit their scheme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from smelt.compress.quantize.scheme_options.two_bit_warnings import two_bit_warnings
from smelt.core.messages import Message
from smelt.planning.plan import PlanStep


def unsuitable_method_notes(steps: Sequence[PlanStep]) -> Iterator[Message]:
    """Yield a note for each step whose method does not suit its scheme; the run warns about it again.

    Steps with `mixed_precision` are skipped: their bit widths are chosen during the run.
    """
    for step in steps:
        settings: Any = step.settings
        if getattr(settings, "method", None) == "hqq" and getattr(settings, "mixed_precision", None) is None:
            for found in two_bit_warnings(settings.used_schemes()):
                yield replace(found, severity="info", step=step.name)
