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
            f"quantize: method: hqq fits scales, which cuts ends of ranges off; in {name} that costs most"
            " models more than it gains (docs/quantize.md#hqq). Compare nearest, or gptq where there are"
            " rows",
            setting="method",
        )
        for name in few
    ]
