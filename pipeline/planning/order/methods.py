"""Ways to choose codes that do not suit them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from smelt.compress.quantize.from_schemes.two_bits import two_bits
from smelt.core.messages import Message
from smelt.planning.plan import Step


def unfit_methods(steps: Sequence[Step]) -> Iterator[Message]:
    """Yield a note for each step whose method is not for its codes; the run warns of those that were made.

    Nothing of `mixed_precision`, whose widths are chosen when the step works.
    """
    for step in steps:
        settings: Any = step.settings
        if getattr(settings, "method", None) == "hqq" and getattr(settings, "mixed_precision", None) is None:
            for found in two_bits(settings.schemes()):
                yield replace(found, severity="info", step=step.name)
