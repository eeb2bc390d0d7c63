"""Splitting and padding batches for graphs with fixed shapes."""

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.runtimes.fixed_shapes import FixedShape, FixedShapeBackend, fixed_feeds, read_fixed_shape
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick
IDS = np.array([[7, 8, 9], [3, 4, 1], [5, 1, 1]])
MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"input_ids": (None, None)}, FixedShape()),
        ({"input_ids": (1, 8), "attention_mask": (1, 8)}, FixedShape(1, 8)),
        ({"input_ids": (None, 8)}, FixedShape(None, 8)),
        ({"pixel_values": (None, 3, 16, 16)}, FixedShape()),
        ({"pixel_values": (4, 3, 16, 16)}, FixedShape(4, None)),
    ],
)
def test_fixed_sizes_are_read_from_input_shapes(inputs, expected):
    shape = read_fixed_shape(inputs)
    assert shape == expected
    assert bool(shape) == (expected != FixedShape())


def test_missing_rows_repeat_the_last_one_and_padding_has_no_mask():
    calls = fixed_feeds({"input_ids": IDS, "attention_mask": MASK}, FixedShape(2, 4), pad=1)
    assert [call["input_ids"].tolist() for call in calls] == [
        [[7, 8, 9, 1], [3, 4, 1, 1]],
        [[5, 1, 1, 1], [5, 1, 1, 1]],
    ]
    assert [call["attention_mask"].tolist() for call in calls] == [
        [[1, 1, 1, 0], [1, 1, 0, 0]],
        [[1, 0, 0, 0], [1, 0, 0, 0]],
    ]


def test_rows_longer_than_the_graph_are_refused():
    with raises_code("longer-than-graph", InputError):
        fixed_feeds({"input_ids": IDS}, FixedShape(None, 2))


class Counting:
    """A backend whose logits are its token ids, [B, L], or one vector per token, [B, L, 1]."""

    name, version, device, max_tokens_per_call, max_total_tokens = "counting", "1", "cpu", None, None

    def __init__(self, per_token):
        self.per_token, self.shapes = per_token, []

    def call(self, graph, feeds):
        ids = feeds["input_ids"]
        self.shapes.append(ids.shape)
        return {"logits": ids[:, :, None] if self.per_token else ids[:, :2]}


@pytest.mark.parametrize("per_token", [False, True])
def test_outputs_have_neither_filling_nor_padding(per_token):
    inner = Counting(per_token)
    backend = FixedShapeBackend(inner, FixedShape(2, 5))
    logits = backend.call("model", {"input_ids": IDS, "attention_mask": MASK})["logits"]
    assert inner.shapes == [(2, 5), (2, 5)]
    np.testing.assert_array_equal(logits, IDS[:, :, None] if per_token else IDS[:, :2])
    assert (backend.max_tokens_per_call, backend.name) == (5, "counting")


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("per_token", [False, True])
def test_empty_batch_has_empty_outputs(per_token, batch_size):
    inner = Counting(per_token)
    backend = FixedShapeBackend(inner, FixedShape(batch_size, 5))
    logits = backend.call("model", {"input_ids": IDS[:0], "attention_mask": MASK[:0]})["logits"]
    assert inner.shapes == [(batch_size or 0, 5)]
    assert logits.shape == ((0, 3, 1) if per_token else (0, 2))
