"""Batches that are divided over shards, which do not communicate."""

import pytest

from smelt.core.process_group import ShardEnd, gather_parts, in_shard, merge_parts, merge_shares, own_batches

pytestmark = pytest.mark.quick
TEXTS = ["a", "bbb", "cc", "dddd", "e"]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_shards_compute_each_batch_once_with_the_result_of_one_process(count):
    computed, read = [], []

    def batches():
        for text in TEXTS:
            read.append(text)
            yield text

    def compute():
        lengths = {n: computed.append(text) or len(text) for n, text in own_batches(batches())}
        parts = gather_parts(list(lengths.values()))
        longest = max((found for part in parts for found in part), default=0)
        first = merge_shares(lengths)
        return merge_shares({n: longest - first[n] + len(text) for n, text in own_batches(TEXTS)})

    assert compute() == [4] * len(TEXTS)
    known, computed[:] = [], []
    for _ in range(2):  # exchanges
        parts = []
        for number in range(count):
            with pytest.raises(ShardEnd) as end, in_shard(number, count, known):
                compute()
            parts.append(end.value.parts)
        known += merge_parts(parts)
    assert sorted(computed) == sorted(TEXTS)
    read.clear()
    with in_shard(-1, count, known):
        assert compute() == [4] * len(TEXTS)
    assert read == TEXTS  # a reader also counts, such as truncated texts
