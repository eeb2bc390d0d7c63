"""Batches that are computed at the same time: their order, and what happens after an exception."""

import threading
import time

import pytest

from smelt.core.process_group import map_batches

pytestmark = pytest.mark.quick


def test_workers_compute_batches_at_the_same_time_and_keep_their_order():
    together = threading.Barrier(3)

    def compute(number, batch):
        together.wait(20)
        time.sleep(0.01 * (2 - number % 3))  # the first ones end last
        return number, batch.upper()

    results = list(map_batches(compute, "abcdef", workers=3))
    assert results == [(batch, (number, batch.upper())) for number, batch in enumerate("abcdef")]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fails", ["batch", "caller"])
def test_no_batch_begins_after_an_exception(workers, fails):
    begun = []

    def compute(number, _):
        begun.append(number)
        if fails == "batch":
            raise KeyError(number)
        time.sleep(0.02)

    def use_results():
        for batch, _ in map_batches(compute, range(200), workers):
            raise KeyError(batch)

    with pytest.raises(KeyError, match="0"):
        use_results()
    assert len(begun) < 200
