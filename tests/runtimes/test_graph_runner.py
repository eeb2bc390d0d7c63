"""Rows go into a graph and come out of it on the axis that holds them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smelt.core.errors import RunError
from smelt.data.npz_arrays import read_npz
from smelt.runtimes.registry import open_runner
from smelt.runtimes.single_call_runners import GraphRunner, outputs_by_sample
from tests.support.graphs import imported_graphs as graphs

NAMED = (["batch", "time", 4], ["layers", "batch", 8], ["layers", "batch", 8])


def rows_of(folder: Path, model: Any, data: Path, size: int) -> list[dict[str, Any]]:
    with open_runner(graphs.make_artifact(folder, model), 1) as runner:
        assert isinstance(runner, GraphRunner)
        return outputs_by_sample(runner, read_npz(data, axes=runner.signature.input_batch_axes), size)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_state_with_rows_on_axis_1_is_sliced_there(size: int, tmp_path: Path) -> None:
    """Cut on axis 0, as if each layer were a row, results were off by 0.76."""
    feeds = graphs.gru_rows(tmp_path / "r.npz", 20)
    actual = rows_of(tmp_path / "a", graphs.gru_model(*NAMED), tmp_path / "r.npz", size)
    expected = graphs.run_directly(tmp_path / "a/model.onnx", feeds)
    np.testing.assert_allclose(np.stack([row["y"] for row in actual]), expected["y"], atol=1e-5)
    np.testing.assert_allclose(
        np.stack([r["new_state"] for r in actual], 1), expected["new_state"], atol=1e-5
    )


def test_graph_of_fixed_batch_size_repeats_the_last_row(tmp_path: Path) -> None:
    graphs.write_rows(tmp_path / "r.npz", 10)
    actual = rows_of(tmp_path / "a", graphs.two_layer_classifier(batch=4), tmp_path / "r.npz", 32)
    expected = rows_of(tmp_path / "b", graphs.two_layer_classifier(), tmp_path / "r.npz", 32)
    assert len(actual) == 10
    np.testing.assert_allclose([r["logits"] for r in actual], [r["logits"] for r in expected], rtol=1e-5)


def test_output_without_an_entry_per_row_is_an_error(tmp_path: Path) -> None:
    model = graphs.two_layer_classifier()
    model.graph.output.append(graphs.value_info("w1", [8, 16]))
    graphs.write_rows(tmp_path / "r.npz", 5)
    with pytest.raises(RunError) as raised:
        rows_of(tmp_path / "a", model, tmp_path / "r.npz", 5)
    assert raised.value.code == "unclear-rows"
    alone = rows_of(tmp_path / "b", model, tmp_path / "r.npz", 1)
    assert {row["w1"].shape for row in alone} == {(8, 16)}
