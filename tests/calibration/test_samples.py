"""Rows that are looked at: as many as are asked for, from all batches."""

import pytest
import torch

from smelt.calibration.samples import CalibrationSamples


def rows_of(*sizes):
    """Batches of texts of 4 tokens, each text its number throughout."""
    numbers = torch.arange(sum(sizes)).split(sizes)
    batches = [{"input_ids": n[:, None].repeat(1, 4)} for n in numbers]
    batches = [batch | {"attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches]
    return CalibrationSamples("made", batches, sum(sizes), 4 * sum(sizes))


@pytest.mark.parametrize(("sizes", "wanted", "numbers"), [
    ((3, 1, 4), 3, [0, 3, 4]),  # the first of each batch
    ((3, 1, 4), 2, [0, 4]), ((3, 1, 4), 5, [0, 2, 3, 5, 7]), ((8,), 3, [0, 1, 2]), ((8,), 8, list(range(8))),
    ((8,), 64, list(range(8))), ((3, 1, 4), 64, list(range(8))),
])  # fmt: skip
def test_requested_number_of_samples_is_returned(sizes, wanted, numbers):
    subset = rows_of(*sizes).subset(wanted)
    assert len(subset.batches) == subset.num_samples == min(wanted, sum(sizes))
    assert all(len(batch["input_ids"]) == 1 for batch in subset.batches)
    assert subset.tokens == 4 * subset.num_samples
    assert [int(batch["input_ids"][0, 0]) for batch in subset.batches] == numbers
