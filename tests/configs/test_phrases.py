"""Tests of the example model's phrase generator and of the files that ship with it."""

from __future__ import annotations

import gzip
import json
from datetime import date, time
from itertools import islice
from pathlib import Path
from typing import get_args

import pytest
from babel.dates import format_date, format_time
from babel.numbers import format_percent
from babel.units import format_unit

import smelt.configs.quickstart.phrases as generator

pytestmark = pytest.mark.quick

FOLDER = Path(generator.__file__).parent
SHIPPED = {"train": 12_000, "validation": 300, "test": 500}
SHIPPED_SEED = 1


def _shipped(split: str) -> list[dict[str, str]]:
    with gzip.open(FOLDER / "data" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _take(split: generator.Split, seed: int, count: int) -> list[dict[str, str]]:
    return list(islice(generator.phrases(split, seed), count))


def test_a_seed_fixes_the_sequence() -> None:
    assert _take("train", 3, 200) == _take("train", 3, 200)
    assert _take("train", 3, 200) != _take("train", 4, 200)


def test_no_phrase_is_in_two_splits() -> None:
    drawn = {"train": 3_000, "validation": 200, "test": 200}
    sources = {s: {r["source"] for r in _take(s, 9, drawn[s])} for s in get_args(generator.Split)}
    assert not sources["train"] & sources["validation"]
    assert not sources["train"] & sources["test"]
    assert not sources["validation"] & sources["test"]


def test_a_source_has_one_target_and_plain_spaces() -> None:
    targets: dict[str, str] = {}
    for row in _take("train", 11, 3_000):
        assert targets.setdefault(row["source"], row["target"]) == row["target"]
        for text in row.values():
            assert text == " ".join(text.split())


@pytest.mark.parametrize("split", get_args(generator.Split))
def test_shipped_rows_are_distinct_and_of_their_split(split: generator.Split) -> None:
    rows = _shipped(split)
    assert len(rows) == len({row["source"] for row in rows}) == SHIPPED[split]
    assert all(generator.split_of(row["source"]) == split for row in rows)


@pytest.mark.parametrize(("split", "count"), [("train", 1_000), ("validation", 50), ("test", 50)])
def test_shipped_rows_equal_generator_output(split: generator.Split, count: int) -> None:
    assert generator.distinct_rows(split, count, SHIPPED_SEED) == _shipped(split)[:count]


def test_shipped_rows_equal_babel_formatting() -> None:
    """Pairs built from Babel's formats alone occur, clause for clause, in the shipped rows."""
    clauses: set[tuple[str, str]] = set()
    for row in _shipped("train"):
        sources, targets = (row[side].split("; ") for side in ("source", "target"))
        clauses.update(zip(sources, targets, strict=True))

    def pair(form: str, amount: int) -> tuple[str, str]:
        english, german = (format_unit(amount, form, "long", locale=loc) for loc in ("en", "de"))
        return english, german

    lengths = [pair("length-kilometer", n) for n in range(1, 100)]
    assert ("4 kilometers", "4 Kilometer") in lengths
    assert clauses & set(lengths)


def test_a_clause_is_formatted_as_babel_formats_it() -> None:
    day, moment = date(2025, 3, 3), time(16, 15)
    english, german = generator._date(day, "full")
    assert english == format_date(day, "full", locale="en") == "Monday, March 3, 2025"
    assert german == format_date(day, "full", locale="de") == "Montag, 3. März 2025"
    times = [format_time(moment, "short", locale=loc) for loc in ("en", "de")]
    assert generator._time(16 * 60 + 15) == (" ".join(times[0].split()), times[1])
    share = generator._both(lambda locale: format_percent(0.34, locale=locale))
    assert share == ("34%", "34 %")


def test_the_shipped_weights_are_small() -> None:
    assert (FOLDER / "model" / "model.safetensors").stat().st_size <= 12_000_000
