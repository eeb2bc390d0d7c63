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


@pytest.mark.parametrize(
    ("sizes", "wanted", "numbers"),
    [
        ((3, 1, 4), 3, [0, 3, 4]),  # the first of each batch
        ((3, 1, 4), 2, [0, 4]),
        ((3, 1, 4), 5, [0, 2, 3, 5, 7]),
        ((8,), 3, [0, 1, 2]),
        ((8,), 8, list(range(8))),
        ((8,), 64, list(range(8))),
        ((3, 1, 4), 64, list(range(8))),
    ],
)
def test_some_rows_are_as_many_as_are_asked_for(sizes, wanted, numbers):
    found = rows_of(*sizes).subset(wanted)
    assert len(found.batches) == found.num_samples == min(wanted, sum(sizes))
    assert all(len(batch["input_ids"]) == 1 for batch in found.batches)
    assert found.tokens == 4 * found.num_samples
    assert [int(batch["input_ids"][0, 0]) for batch in found.batches] == numbers
