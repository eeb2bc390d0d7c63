"""What a classifier is fed."""

from pathlib import Path

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.generation.backend import Batch
from smelt.generation.runner import ModelFiles
from smelt.generation.search import generate_resolved
from smelt.runtimes.single_call_runners import ClassifierRunner
from tests.support.expected_errors import raises_code

IDS, MASK = np.array([[7, 8, 9], [3, 4, 0]]), np.array([[1, 1, 1], [1, 1, 0]])


class Noting:
    """A backend whose logits are what it was fed."""

    name, version, device, max_tokens_per_call, max_total_tokens = "noting", "1", "cpu", None, None

    def call(self, graph, feeds):
        assert graph == "model"
        return {"logits": np.stack([feeds[n] for n in ("input_ids", "attention_mask", "token_type_ids")])}


@pytest.fixture
def model():
    return ClassifierRunner(ModelFiles(Path("m"), {}, {}), Noting(), generate_resolved)


@pytest.mark.parametrize("types", [None, np.array([[0, 1, 1], [0, 1, 0]])])
def test_single_texts_have_token_type_zero_by_default(model, types):
    expected = np.zeros_like(IDS) if types is None else types
    np.testing.assert_array_equal(model.forward(Batch(IDS, MASK, types)), [IDS, MASK, expected])


@pytest.mark.parametrize("ask", [
    lambda model: model.encode(Batch(IDS, MASK)),
    lambda model: model.decode_step(None, IDS[:, 0]),
    lambda model: model.reorder_cache(None, IDS[:, 0]),
])  # fmt: skip
def test_classifier_does_not_generate_text(model, ask):
    with raises_code("does-not-generate", InputError):
        ask(model)
