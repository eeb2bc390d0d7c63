"""IBM Model 1 compared with the algorithm as it is printed, and the lists that are made of it."""

from collections import defaultdict

import numpy as np
import pytest

from smelt.compress import shortlist
from smelt.compress.shortlist import count_word_pairs, fit_ibm_model1, top_targets

pytestmark = pytest.mark.quick

SOURCES, TARGETS = 5, 6
# the house, the book, a book: Koehn 2010, Statistical Machine Translation, figure 4.4
ROWS = [([0, 1], [0, 1]), ([0, 2], [0, 2]), ([3, 2], [3, 2]), ([4, 4, 1], [5]), ([1], [1, 1, 4])]


def printed(rows, iterations):
    """Koehn 2010, figure 4.3, with the word NULL, line by line."""
    rows = [([*source, SOURCES], target) for source, target in rows]
    t = defaultdict(lambda: 1.0)
    for _ in range(iterations):
        count, total = defaultdict(float), defaultdict(float)
        for source, target in rows:
            s_total = {e: sum(t[e, f] for f in source) for e in target}
            for e in target:
                for f in source:
                    count[e, f] += t[e, f] / s_total[e]
                    total[f] += t[e, f] / s_total[e]
        t = defaultdict(float, {(e, f): count[e, f] / total[f] for e, f in count})
    return t


@pytest.mark.parametrize("iterations", [1, 2, 7])
@pytest.mark.parametrize("at_once", [1, 12, 4_000_000])
def test_model1_equals_reference_for_any_chunk_size(iterations, at_once, monkeypatch):
    monkeypatch.setattr(shortlist, "_CHUNK_PAIRS", at_once)
    table = fit_ibm_model1(ROWS, SOURCES, TARGETS, iterations)
    expected = printed(ROWS, iterations)
    probabilities = {(f, e): p for (e, f), p in expected.items() if f != SOURCES}
    pairs = list(zip(table.source.tolist(), table.target.tolist(), strict=True))
    assert sorted(pairs) == sorted(probabilities)
    assert table.probability == pytest.approx([probabilities[pair] for pair in pairs])


def test_pairs_are_sorted_by_source_and_probability():
    table = fit_ibm_model1(ROWS, SOURCES, TARGETS, 7)
    order = list(zip(table.source, -table.probability, table.target, strict=True))
    assert order == sorted(order)
    lists = top_targets(table, SOURCES, 1, np.zeros(0, dtype=np.int64))
    assert [words.tolist() for words in lists] == [[0], [1], [2], [3], [5]]


def test_target_lists_are_limited_and_exclude_frequent_tokens():
    table = fit_ibm_model1(ROWS, SOURCES + 1, TARGETS, 7)
    lists = top_targets(table, SOURCES + 1, 2, np.array([1]))
    assert [len(words) for words in lists] == [2, 2, 2, 2, 1, 0]  # the last word was never seen
    assert not any(1 in words for words in lists)
    assert lists[0][0] == 0


def test_pairs_with_null_token_are_counted():
    assert count_word_pairs(([3, 4], [1, 2, 5])) == 9
