"""The schemes side by side, as `smelt stages quantize` shows them, made of what they declare."""

from __future__ import annotations

import textwrap
from itertools import zip_longest

from smelt.runtime.schemes.registry import SCHEMES, bits_per_weight, defaults, said, targets_of
from smelt.runtime.schemes.scheme import Scheme

# columns and how wide each is; with two spaces between them, and before the first, 79 in all
_COLUMNS = {"scheme": 14, "bits": 4, "data": 4, "training": 8, "runtimes": 16, "pays": 21}


def scheme_table() -> str:
    """Return the table, each line indented by two spaces, and what its columns say."""
    rows = [list(_COLUMNS), *(_cells(scheme) for scheme in SCHEMES.values())]
    lines = [line for row in rows for line in _lines(row)]
    told = (
        "bits: per weight, scales and zero points included, with the default options. data:"
        " rows that are"
        " looked at. training: whether the weights say little before it. runtimes: targets of `onnx`; torch"
        f" runs all schemes. pays: where it gains something.{_narrow()}"
    )
    return "\n".join(lines) + "\n\n" + told


def _narrow() -> str:
    """Say which schemes run somewhere with some of their options alone."""
    told = [
        f" For {target} {scheme.name} wants {' and '.join(said(*option) for option in only.items())}."
        for scheme in SCHEMES.values()
        for target, only in scheme.runs_only.items()
    ]
    return "".join(told).replace("`", "")


def _cells(scheme: Scheme) -> list[str]:
    return [
        scheme.name,
        f"{bits_per_weight(scheme, defaults(scheme)):.3g}",
        "rows" if scheme.observes else "none",
        "needed" if scheme.trained else "none",
        ", ".join(targets_of([scheme])) or "torch alone",
        scheme.pays,
    ]


def _lines(cells: list[str]) -> list[str]:
    """Return the lines of a row: what is wider than its column goes on in the next line."""
    wrapped = [
        textwrap.wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(cells, _COLUMNS.values(), strict=True)
    ]
    return [
        "".join(f"  {part:{width}}" for part, width in zip(parts, _COLUMNS.values(), strict=True)).rstrip()
        for parts in zip_longest(*wrapped, fillvalue="")
    ]
