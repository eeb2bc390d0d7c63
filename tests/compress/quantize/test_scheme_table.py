"""The column `pays` of the table of schemes says what was measured: docs/measurements/quantization.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from smelt.quantization.schemes.registry import SCHEMES

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "measurements" / "quantization.md").read_text(encoding="utf-8")
READS = "Classification"  # the others write, token by token
_CELL = re.compile(r"ms(?: \(unstable\))?, ([\d.]+)")


def gains(name: str, runtime: str, rows: int) -> Iterator[tuple[str, float]]:
    """Yield each model and how many times as fast as float32 the scheme is in `runtime`,
    `calibration_samples` at a time.

    Of each model the first table of times, of the machine that measured all schemes.
    """
    for section in PAGE.split("\n## ")[1:]:
        table = section.partition("| arm | ONNX Runtime, 1 |")
        lines = (table[1] + table[2]).partition("\n\n")[0].splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        for row in cells[2:]:
            if row[0].split()[0] == name and f"{runtime}, {rows}" in cells[0]:
                found = _CELL.search(row[cells[0].index(f"{runtime}, {rows}")])
                if found:
                    yield section.split(":")[0], float(found[1])


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "bnb-int8"])  # it stays in torch
def test_a_scheme_pays_where_the_tables_say_so(name: str) -> None:
    pays = SCHEMES[name].recommended_for
    one = dict(gains(name, "ONNX Runtime", 1))
    assert len(one) == (3 if name in ("int3", "int2", "ternary", "binary") else 4) or name == "bnb-nf4"
    many = [gain for rows in (8, 32) for _, gain in gains(name, "ONNX Runtime", rows)]
    assert ("one text and for many" in pays) == (min([*one.values(), *many]) > 1.4)
    written = [gain for model, gain in one.items() if model != READS]
    if "models that write, one text" in pays:
        assert min(written) > 1.25
        assert one[READS] < 1.1
        assert max(many) < 1.2
    in_openvino = [gain for rows in (1, 8, 32) for _, gain in gains(name, "OpenVINO", rows)]
    assert ("OpenVINO" in pays) == bool(in_openvino)
    assert not in_openvino or min(in_openvino) > 1.25
    assert ("no speed-up" in pays) == (max(*one.values(), *many) < 1)


@pytest.mark.parametrize("name", [name for name in SCHEMES if "as fast as" in SCHEMES[name].recommended_for])
def test_a_scheme_is_as_fast_as_the_one_that_it_names(name: str) -> None:
    other = SCHEMES[name].recommended_for.partition("as fast as ")[2].replace("4 bits", "int4")
    for rows in (1, 8, 32):
        mine, its = (dict(gains(one, "ONNX Runtime", rows)) for one in (name, other))
        for model in mine:
            # times of one thread are apart by a tenth in themselves
            assert mine[model] == pytest.approx(its[model], rel=0.16), (model, rows)
