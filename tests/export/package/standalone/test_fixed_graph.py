"""A graph of fixed shape called with any number of rows, without onnxruntime."""

from types import SimpleNamespace

import numpy as np
import pytest

from smelt.export.package.standalone.fixed_graph import FixedGraph

pytestmark = pytest.mark.quick


def doubling_session(batch_size, length):
    """A session that returns ids times two as [B, L, 1], and refuses inputs of another shape."""

    def run(names, feeds):
        ids = feeds["input_ids"]
        assert len(ids) == batch_size if batch_size else len(ids) > 0
        assert ids.shape[1] == (length or ids.shape[1])
        return [2 * ids[..., None] for _ in names]

    return SimpleNamespace(run=run, get_inputs=list)


@pytest.mark.parametrize(("batch_size", "length"), [(2, 8), (2, None), (None, 8)])
@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_outputs_have_the_rows_and_tokens_of_the_inputs(batch_size, length, rows):
    ids = np.arange(rows * 3).reshape(rows, 3)
    graph = FixedGraph(doubling_session(batch_size, length), batch_size, length, pad=7)
    [output] = graph.run(["logits"], {"input_ids": ids})
    np.testing.assert_array_equal(output, 2 * ids[..., None])
