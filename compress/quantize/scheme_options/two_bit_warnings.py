"""Warnings about HQQ with two bits, for the plan and the stage."""

from __future__ import annotations

from collections.abc import Iterable

from smelt.core.messages import Message, warning
from smelt.runtime.schemes.registry import SCHEMES


def two_bit_warnings(schemes: Iterable[str]) -> list[Message]:
    """Return a warning if two-bit schemes are among `schemes`, by name."""
    few = sorted(name for name in schemes if SCHEMES[name].bits == 2)
    return [
        warning(
            "hqq-two-bits",
            "method: hqq clips the range of the weights, which lowers the quality of most models with"
            f" {name} (docs/reference/stages/quantize.md#hqq). Compare with method: rtn, or with"
            " gptq if there are samples.",
            setting="method",
        )
        for name in few
    ]
