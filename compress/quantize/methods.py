"""The methods of `quantize`, and the schemes that each supports; those that tune blocks have a file each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from smelt.quantization.scheme import Scheme
from smelt.quantization.schemes.registry import SCHEMES, can_learn_ranges

Method = Literal["rtn", "gptq", "awq", "awq-gptq", "autoround", "hqq", "aqlm"]
# methods that rescale channels of the float model before they quantize it
AWQ_METHODS = ("awq", "awq-gptq")


@dataclass(frozen=True)
class BlockMethod:
    """A method that tunes the weights of a block together, to the output of the float block.

    `sequential.py` has the class of its runs, which imports torch.

    summary: for the help, before the names of its schemes. source: the paper. supports: whether it quantizes
    weights of a scheme.
    """

    summary: str
    source: str
    supports: Callable[[Scheme], bool]


BLOCK_METHODS: dict[str, BlockMethod] = {
    "autoround": BlockMethod(
        "learn the rounding and the ranges in minutes, ahead of gptq at 2 bits",
        "Cheng et al. 2023, arXiv:2309.05516",
        can_learn_ranges,
    ),
    "aqlm": BlockMethod(
        "fit codebooks and codes to outputs in minutes",
        "Egiazarian et al. 2024, arXiv:2401.06118",
        lambda scheme: scheme.own_method == "aqlm",
    ),
}
CALIBRATED_METHODS = ("gptq", *BLOCK_METHODS, *AWQ_METHODS)  # methods that use calibration samples


def supports_scheme(method: str, scheme: Scheme) -> bool:
    """Return whether `method` quantizes weights of `scheme`.

    Where a scheme has a method of its own, all others but rtn need the grid that it does not have.
    """
    if method in BLOCK_METHODS:
        return BLOCK_METHODS[method].supports(scheme)
    return method == "rtn" or not scheme.own_method


def methods_for(scheme: Scheme) -> list[str]:
    """Return the methods that quantize weights of `scheme`."""
    return [method for method in get_args(Method) if supports_scheme(method, scheme)]


def schemes_for(method: str) -> list[str]:
    """Return the names of the schemes whose weights `method` quantizes."""
    return [name for name, scheme in SCHEMES.items() if supports_scheme(method, scheme)]
