"""What HQQ does badly, said by the plan and by the stage."""

from __future__ import annotations

from collections.abc import Iterable

from smelt.core.messages import Message, warning
from smelt.runtime.schemes.registry import SCHEMES


def two_bits(schemes: Iterable[str]) -> list[Message]:
    """Return a warning where codes of two bits are among `schemes`, by name."""
    few = sorted(name for name in schemes if SCHEMES[name].bits == 2)
    return [
        warning(
            "hqq-two-bits",
            f"method: hqq clips the range of weights, which costs most models more than it gains in {name}"
            " (docs/reference/stages/quantize.md#hqq). Compare with rtn, or with gptq if there are samples.",
            setting="method",
        )
        for name in few
    ]
