"""The schemes that there are, and what is asked of all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from smelt.core.errors import InputError, nearest
from smelt.runtime.schemes.binary import Binary
from smelt.runtime.schemes.bnb_int8 import BnbInt8
from smelt.runtime.schemes.bnb_nf4 import BnbNf4
from smelt.runtime.schemes.int2 import Int2
from smelt.runtime.schemes.int3 import Int3
from smelt.runtime.schemes.int4 import Int4
from smelt.runtime.schemes.int8_dynamic import Int8Dynamic
from smelt.runtime.schemes.int8_groupwise import Int8Groupwise
from smelt.runtime.schemes.int8_static import Int8Static
from smelt.runtime.schemes.kmeans4 import Kmeans4
from smelt.runtime.schemes.pow2 import Pow2
from smelt.runtime.schemes.scheme import TARGETS, Option, Options, Scheme, Stored, Value, graphs_for
from smelt.runtime.schemes.ternary import Ternary

_ALL: tuple[Scheme, ...] = (
    Int8Dynamic(),
    Int8Static(),
    Int8Groupwise(),
    Int4(),
    Int3(),
    Int2(),
    Kmeans4(),
    Pow2(),
    Ternary(),
    Binary(),
    BnbNf4(),
    BnbInt8(),
)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _ALL}
# those that differ in the bits of their codes alone, by these
WIDTHS: dict[int, Scheme] = {scheme.bits: scheme for scheme in _ALL if scheme.bits}
DEFAULT = Int8Dynamic.name
# those that ONNX Runtime's own quantizers make of a graph: one scale for all activations of a product
OF_GRAPHS = tuple(name for name, scheme in SCHEMES.items() if scheme.one_scale)
# of them, the one whose ranges are found before, on rows of data
OBSERVING = next(name for name in OF_GRAPHS if SCHEMES[name].observes)
# what the 4-bit codes of other tools' checkpoints become: whole numbers in groups, with a zero point
TAKEN = Int4.name
# a width of which every group size is a divisor
_WIDTH = 4096


def find(name: object) -> Scheme:
    """Return the scheme called `name`.

    Raises:
        InputError: there is none.
    """
    if not isinstance(name, str) or name not in SCHEMES:
        known = f"Known: {', '.join(SCHEMES)}.{nearest(str(name), SCHEMES)}"
        raise InputError(f"unknown quantization scheme '{name}'. {known}", code="unknown-scheme")
    return SCHEMES[name]


def check_options(scheme: Scheme, options: Options) -> None:
    """Check what a stored structure, or a caller, tells `scheme`.

    Raises:
        InputError: an option is unknown or missing, or the scheme refuses its value.
    """
    names = [option.name for option in scheme.settings]
    if set(options) != set(names):
        takes = ", ".join(names) or "no options"
        raise InputError(
            f"scheme {scheme.name} cannot be made with {dict(options)}: it takes {takes}.",
            code="unsupported-scheme-options",
        )
    for option in scheme.settings:
        value = options[option.name]
        if not option.allows(value):
            expected = option.expected or f"one of {', '.join(map(worded, option.allowed))}"
            raise InputError(
                f"{option.name.replace('_', ' ')} {value!r}; expected {expected}.",
                code="wrong-value",
                setting=option.name,
            )


def defaults(scheme: Scheme) -> dict[str, Any]:
    """Return the options of `scheme` where a recipe gives none."""
    return {option.name: option.default for option in scheme.settings}


def decided_by_row(scheme: Scheme, width: int, options: Options) -> bool:
    """Say whether the codes and scales of a row of K = `width` inputs depend on that row alone."""
    stored = scheme.storage(1, width, options).values()
    return not scheme.whole(options) and all(one.by_row or one.measured for one in stored)


def options_of_all() -> dict[str, list[tuple[Scheme, Option]]]:
    """Return for each name of an option the schemes that have it, in the order of the schemes."""
    found: dict[str, list[tuple[Scheme, Option]]] = {}
    for scheme in SCHEMES.values():
        for option in scheme.settings:
            found.setdefault(option.name, []).append((scheme, option))
    return found


def bits_per_weight(scheme: Scheme, options: Options, width: int = _WIDTH) -> float:
    """Return the bits that codes and all that belongs to them take in a file, for each weight of a row.

    What is measured is one number for a whole matrix and does not count.
    """
    stored = [one for one in scheme.storage(1, width, options).values() if not one.measured]
    return 8 * sum(filed_bytes(one) for one in stored) / width


def filed_bytes(stored: Stored) -> int:
    """Return the bytes that a tensor takes in a file."""
    found = re.search(
        r"\d+", stored.filed or stored.dtype
    )  # torch's names of types tell the bits, but bool's
    return math.prod(stored.shape) * (int(found[0]) // 8 if found else 1)


def targets_of(schemes: Iterable[Scheme]) -> list[str]:
    """Return the targets of export that run all of `schemes`."""
    asked = list(schemes)
    return [target for target in TARGETS if all(refusal(scheme, target) is None for scheme in asked)]


def schemes_for(target: str) -> list[str]:
    """Return the names of the schemes that the target of export runs."""
    return [name for name, scheme in SCHEMES.items() if refusal(scheme, target) is None]


def refusal(scheme: Scheme, target: str) -> str | None:
    """Return why the target of export, or the one whose graphs it runs, cannot run `scheme`; None: it can."""
    return scheme.refused.get(target) or scheme.refused.get(graphs_for(target))


def unfit(scheme: Scheme, options: Options, target: str) -> list[str]:
    """Return which options of `scheme` the target of export wants otherwise, as a recipe says them.

    Args:
        scheme: one that the target does not refuse.
        options: those that are known; of others nothing is said.
        target: of export.
    """
    wanted = scheme.runs_only.get(graphs_for(target), {})
    return [said(n, values) for n, values in wanted.items() if n in options and options[n] not in values]


def precisions_of(schemes: Iterable[Scheme], target: str) -> list[str]:
    """Return the precisions of a file for the target in which the scales of all schemes keep their digits."""
    kept = [scheme.dtypes.get(graphs_for(target), ()) for scheme in schemes]
    return ["fp32", *(word for word in ("fp16", "bf16") if all(word in one for one in kept))]


def said(name: str, values: Iterable[Value]) -> str:
    """Return an option with its values as a recipe says it."""
    return f"`{name}: {' or '.join(map(worded, values))}`"


def worded(value: Value) -> str:
    """Return a value of an option as a recipe says it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def operators() -> dict[str, tuple[int, ...]]:
    """Return the quantized operators of all schemes, with the inputs that hold scales and zero points."""
    return {name: places for scheme in SCHEMES.values() for name, places in scheme.operators.items()}


def exact_nodes(node: Any) -> list[Any] | None:
    """Return what computes `node` of a graph with whole activations; None where no scheme made it."""
    maker = next((scheme for scheme in SCHEMES.values() if node.op_type in scheme.operators), None)
    return None if maker is None else maker.exact_nodes(node)


def load_tables() -> dict[str, Any]:
    """Return the tables of all schemes (see `Scheme.load_tables`)."""
    return {word: table for scheme in SCHEMES.values() for word, table in scheme.load_tables().items()}
