"""One file as several splits: the same draw everywhere, no copy on both sides, classes in proportion."""

import hashlib
import itertools
import random
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt.core.errors import InputError
from smelt.data.npz_arrays import SampleArrays
from smelt.data.split_division import divide_split, limit_split
from smelt.data.splits import Example, Split, Windows, split_from_arrays
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

SHARES = {"test": 0.1, "validation": 0.2}


def _split(rows, windows=None):
    return Split("a.csv", tuple(rows), windows)


def _labeled(**counts):
    rows = [Example(f"{label} {i}", label=label) for label, n in counts.items() for i in range(n)]
    random.Random(3).shuffle(rows)
    return _split(rows)


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["x", "y", 1, "1", 2.5, None])), min_size=40),
    seed=st.integers(0, 3),
    shares=st.sampled_from([{"test": 0.1}, SHARES, {"test": 0.5, "validation": 0.4}]),
)
def test_splits_are_disjoint_complete_and_share_no_text(rows, seed, shares):
    full_split = _split(
        Example(f"t{text}", label=label, line=line) for line, (text, label) in enumerate(rows)
    )
    if len({e.text for e in full_split.examples}) <= len(shares):
        return
    splits = divide_split(full_split, shares, seed)
    assert set(splits) == {"train", *shares}
    assert sorted(e.line for split in splits.values() for e in split.examples) == list(range(len(rows)))
    texts = [{e.text for e in split.examples} for split in splits.values()]
    assert sum(map(len, texts)) == len(set.union(*texts))
    assert all(texts)
    for split in splits.values():
        assert [e.line for e in split.examples] == sorted(e.line for e in split.examples)


def test_split_is_stratified_by_class():
    splits = divide_split(_labeled(a=500, b=300, c=200), SHARES, 0)
    assert Counter(e.label for e in splits["test"].examples) == {"a": 50, "b": 30, "c": 20}
    assert Counter(e.label for e in splits["validation"].examples) == {"a": 100, "b": 60, "c": 40}


def test_rounding_remainders_are_distributed_by_size():
    splits = divide_split(_labeled(a=46, b=27, c=27), {"test": 0.1}, 0)  # 4.6, 2.7, 2.7
    assert Counter(e.label for e in splits["test"].examples) == {"a": 4, "b": 3, "c": 3}


def test_class_with_one_text_is_kept_in_train():
    splits = divide_split(_labeled(a=60, b=39, rare=1), {"test": 0.5, "validation": 0.4}, 0)
    assert "rare" in {e.label for e in splits["train"].examples}
    assert {e.label for e in splits["train"].examples} == {"a", "b", "rare"}


def test_no_class_is_drawn_completely():
    splits = divide_split(_labeled(a=2, b=2), {"test": 0.9}, 0)
    assert {e.label for e in splits["train"].examples} == {"a", "b"}


def test_equal_numbers_are_one_class_in_any_notation():
    rows = [Example(f"{i}", label=f"1.{'0' * i}") for i in range(40)]
    rows += [Example(f"z{i}", label=0) for i in range(60)]
    test_examples = divide_split(_split(rows), {"test": 0.1}, 0)["test"].examples
    assert sum(float(e.label) for e in test_examples) == 4


def test_label_sets_are_classes_and_rare_ones_are_merged():
    rows = [Example(f"{i}", label=("a", "b") if i % 2 else ("b", "a")) for i in range(100)]
    rows += [Example(f"r{i}", label=(f"x{i}",)) for i in range(100)]
    test_examples = divide_split(_split(rows), {"test": 0.1}, 0)["test"].examples
    assert len(test_examples) == 20
    assert sum(e.label in (("a", "b"), ("b", "a")) for e in test_examples) == 10


def test_regression_labels_are_not_stratified():
    for kind in (float, str):
        rows = [Example(f"{i}", label=kind(i + 0.5)) for i in range(100)]
        assert len(divide_split(_split(rows), {"test": 0.1}, 0)["test"]) == 10


def test_split_depends_only_on_seed_and_texts():
    """The digest was recorded: other versions and machines must draw the same rows."""
    rows = [Example(f"text {i}", (f"t{i}",)) for i in range(1000)]
    test_texts = [e.text for e in divide_split(_split(rows), SHARES, 7)["test"].examples]
    assert len(test_texts) == 100
    assert hashlib.sha256("\n".join(test_texts).encode()).hexdigest()[:16] == "c470d9cc7584d251"
    backwards = divide_split(_split(rows[::-1]), SHARES, 7)["test"]
    assert sorted(e.text for e in backwards.examples) == sorted(test_texts)
    other = {e.text for e in divide_split(_split(rows), SHARES, 8)["test"].examples}
    assert 0 < len(other & set(test_texts)) < 30  # 10 by chance


def test_running_text_is_split_in_contiguous_blocks():
    lines = _split((Example(f"line {i}", line=i) for i in range(5000)), Windows(separator="\n"))
    splits = divide_split(lines, SHARES, 0)
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 3500,
        "test": 500,
        "validation": 1000,
    }
    numbers = [e.line for e in splits["test"].examples]
    assert all(
        numbers[start : start + 50] == list(range(numbers[start], numbers[start] + 50))
        for start in range(0, 500, 50)
    )
    assert splits["test"].windows == lines.windows
    small_split = _split((Example(f"{i}") for i in range(10)), Windows(separator="\n"))
    assert len(divide_split(small_split, {"test": 0.1}, 0)["test"]) == 1


def test_copies_of_document_are_in_one_split():
    rows = [Example(f"{i // 4}") for i in range(400)]
    splits = divide_split(_split(rows, Windows(separator="\n\n")), {"test": 0.1}, 0)
    assert len(splits["test"]) == 40
    assert not {e.text for e in splits["test"].examples} & {e.text for e in splits["train"].examples}


def test_array_rows_are_not_called_texts():
    rows = split_from_arrays("a.npz", SampleArrays({"x": np.full((9, 2), np.nan)}, 9))
    with raises_code("too-few-texts", InputError) as excinfo:
        divide_split(rows, SHARES, 0)
    assert "text" not in str(excinfo.value)


def test_too_few_texts_are_rejected():
    with raises_code("too-few-texts", InputError) as excinfo:
        divide_split(_split([Example("a"), Example("b"), Example("a")]), SHARES, 0)
    assert "a.csv" in str(excinfo.value)
    assert re.findall(r"\d+", str(excinfo.value)) == ["2", "3"]
    assert {n: len(p) for n, p in divide_split(_split([Example(c) for c in "abc"]), SHARES, 0).items()} == {
        "test": 1,
        "validation": 1,
        "train": 1,
    }


def test_limit_is_spread_over_classes_and_file():
    rows = [Example(f"{label} {i}", label=label) for label in "abcd" for i in range(100)]  # sorted by class
    limited = limit_split(_split(rows), 16)
    assert Counter(e.label for e in limited.examples) == dict.fromkeys("abcd", 4)
    assert [e.text for e in limited.examples[:4]] == ["a 0", "a 25", "a 50", "a 75"]
    assert limit_split(_split(rows), 16).fingerprint == limited.fingerprint


def test_limit_keeps_class_proportions_and_rare_classes():
    split = _labeled(common=880, some=100, rare=2)
    assert Counter(e.label for e in limit_split(split, 100).examples) == {"common": 88, "some": 11, "rare": 1}
    assert len(limit_split(split, 2)) == 2
    assert limit_split(split, None) is split
    assert limit_split(split, 5000) is split


@pytest.mark.parametrize("rows", [1, 7, 31, 64, 300, 999])
def test_limit_without_classes_has_requested_number_of_rows(rows):
    texts = [Example(f"row {i}", references=("x",)) for i in range(1000)]
    assert len(limit_split(_split(texts), rows)) == rows
    amounts = [Example(f"row {i}", label=i / 7) for i in range(1000)]
    assert len(limit_split(_split(amounts), rows)) == rows
    lines = [Example(f"row {i}") for i in range(1000)]
    chosen = limit_split(_split(lines, Windows(separator="\n")), rows).examples
    indices = [int(e.text.split()[1]) for e in chosen]
    assert len(set(indices)) == rows
    assert sum(b != a + 1 for a, b in itertools.pairwise(indices)) <= 7  # 8 stretches
    if rows == 300:
        assert indices[-1] == 999
