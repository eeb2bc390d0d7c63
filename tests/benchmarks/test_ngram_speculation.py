"""The steps of a search that verifies drafts, counted by hand."""

import pytest
from ngram_speculation import lookup, table, tokens_per_step, word_ids

pytestmark = pytest.mark.quick


def test_lookup_prefers_longer_contexts_then_output_then_the_last_occurrence():
    source = [1, 2, 3, 4, 9, 2, 5, 6]
    assert lookup(2, 2)(source, [7, 1, 2]) == [3, 4]  # after 1, 2
    assert lookup(1, 2)(source, [7, 1, 2]) == [5, 6]  # after the last 2
    assert lookup(2, 3)(source, [2, 8, 7, 2]) == [8, 7, 2]
    assert lookup(2, 2)(source, [7, 7, 8]) == []


def test_table_drafts_the_most_frequent_continuations():
    draft = table([[1, 2, 3], [1, 2, 3], [1, 2, 4], [5, 2, 6]], 2, 2)
    assert draft([], [1]) == [2, 3]
    assert draft([], [5, 2]) == [6]  # nothing follows 2, 6
    assert table([[1, 2, 3]], 1, 1)([], [3]) == []


def test_step_returns_accepted_draft_and_one_token():
    # first token; 2 and 3 drafted, accepted, then 8; no draft: 9
    assert tokens_per_step([([1, 2, 3, 4], [1, 2, 3, 8, 9])], lookup(1, 2)) == (5 / 3, 2 / 3)
    # of the draft 3, 4 only the first token is accepted
    assert tokens_per_step([([2, 3, 4], [2, 3, 5])], lookup(1, 2)) == (3 / 2, 2 / 2)


def test_equal_words_have_equal_ids():
    [first], [second] = word_ids(["#Person1# is here."]), word_ids(["here is #Person1#"])
    assert len(first) == 5
    assert sorted(first[:3] + first[4:]) == sorted(second)
