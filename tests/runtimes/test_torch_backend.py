"""What torch holds: rows that are repeated, moved and dropped go on as their own would."""

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.runtimes.registry import open_runner
from tests.support.expected_errors import raises_code
from tests.support.models import generation_models, tiny


@pytest.fixture(scope="module", params=generation_models.SEQ2SEQ)
def runner(request, tmp_path_factory):
    path = generation_models.write_model(request.param, tmp_path_factory.mktemp(request.param))
    return open_runner(tiny.as_artifact(path))


def steps(runner, batch, rows):
    """Feed each row of tokens in turn; return the last scores."""
    state = runner.encode(batch)
    for tokens in rows:
        scores = runner.decode_step(state, np.array(tokens))
    return scores


def test_closed_model_raises_an_error(tmp_path):
    with open_runner(tiny.as_artifact(generation_models.write_model("marian", tmp_path))) as opened:
        pass
    with raises_code("closed-model", InputError):
        opened.encode(generation_models.random_batch(2, seed=1))


def test_reordered_rows_equal_rows_with_their_history(runner):
    batch = generation_models.random_batch(2, seed=1)
    state = runner.encode(batch)
    runner.decode_step(state, np.array([3, 3]))
    state = runner.reorder_cache(state, np.array([0, 0, 1, 1]))
    runner.decode_step(state, np.array([4, 5, 6, 7]))
    mask = state.backend_state.encoder_mask
    state = runner.reorder_cache(state, np.array([1, 1, 3, 2]))
    assert state.backend_state.encoder_mask is mask, "beams of a sentence share what comes from the encoder"
    scores = runner.decode_step(state, np.array([8, 9, 10, 11]))
    first = steps(runner, batch, [[3, 3], [5, 7], [8, 10]])
    second = steps(runner, batch, [[3, 3], [5, 6], [9, 11]])
    np.testing.assert_allclose(scores, np.stack([first[0], second[0], first[1], second[1]]), atol=1e-4)
    state = runner.reorder_cache(state, np.array([2]))
    dropped = runner.decode_step(state, np.array([12]))
    expected = steps(runner, batch, [[3, 3], [5, 7], [8, 10], [12, 12]])
    np.testing.assert_allclose(dropped[0], expected[1], atol=1e-4)
