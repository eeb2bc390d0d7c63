"""The table of schemes in `smelt stages quantize`, generated from their declarations."""

from __future__ import annotations

import textwrap
from itertools import zip_longest

from smelt.runtime.schemes.registry import (
    SCHEMES,
    bits_per_weight,
    default_options,
    format_option,
    supported_targets,
)
from smelt.runtime.schemes.scheme import Scheme

# columns and their widths; with two spaces before each, 79 in total
_COLUMNS = {"scheme": 14, "bits": 4, "data": 4, "training": 8, "runtimes": 16, "pays": 21}


def scheme_table() -> str:
    """Return the table, each line indented by two spaces, and an explanation of its columns."""
    rows = [list(_COLUMNS), *(_row_cells(scheme) for scheme in SCHEMES.values())]
    lines = [line for row in rows for line in _wrap_row(row)]
    told = (
        "bits: per weight, scales and zero points included, with the default options. data:"
        " calibration samples. training: whether training after quantization is needed. runtimes: targets of"
        f" `onnx`; torch runs all schemes. pays: where the scheme is useful.{_restricted_schemes()}"
    )
    return "\n".join(lines) + "\n\n" + told


def _restricted_schemes() -> str:
    """Return sentences about schemes that a runtime supports only with certain options."""
    told = [
        f" For {target}, {scheme.name} needs"
        f" {' and '.join(format_option(*option) for option in only.items())}."
        for scheme in SCHEMES.values()
        for target, only in scheme.required_options.items()
    ]
    return "".join(told).replace("`", "")


def _row_cells(scheme: Scheme) -> list[str]:
    return [
        scheme.name,
        f"{bits_per_weight(scheme, default_options(scheme)):.3g}",
        "yes" if scheme.requires_calibration else "none",
        "needed" if scheme.requires_training else "none",
        ", ".join(supported_targets([scheme])) or "torch only",
        scheme.recommended_for,
    ]


def _wrap_row(cells: list[str]) -> list[str]:
    """Return the lines of a table row, with cells wrapped to their column widths."""
    wrapped = [
        textwrap.wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(cells, _COLUMNS.values(), strict=True)
    ]
    return [
        "".join(f"  {part:{width}}" for part, width in zip(parts, _COLUMNS.values(), strict=True)).rstrip()
        for parts in zip_longest(*wrapped, fillvalue="")
    ]
