"""The copy of a graph computes what the original does, wherever its weights lay."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from smelt.core.errors import InputError
from smelt.runtimes.onnx_import.import_graph import import_graph
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs

pytestmark = pytest.mark.quick

X = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


def outputs(path: Path) -> np.ndarray:
    return onnxruntime.InferenceSession(str(path)).run(None, {"x": X})[0]


def test_graph_with_embedded_weights_is_copied_unchanged(tmp_path: Path) -> None:
    source = graphs.save_model(graphs.two_layer_classifier(), tmp_path / "any.onnx")
    (tmp_path / "out").mkdir()
    assert import_graph(source, tmp_path / "out", outside=False).read_bytes() == source.read_bytes()


def test_weights_of_other_file_names_are_merged_in_one_file(tmp_path: Path) -> None:
    source = graphs.save_model(graphs.two_layer_classifier(), tmp_path / "any.onnx", "manifest.json")
    (tmp_path / "out").mkdir()
    imported = import_graph(source, tmp_path / "out", outside=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.onnx", "model.onnx_data"]
    np.testing.assert_array_equal(outputs(imported), outputs(source))


def test_range_shared_by_two_tensors_is_copied_once(tmp_path: Path) -> None:
    source = graphs.save_model(graphs.two_layer_classifier(), tmp_path / "any.onnx", "weights.bin")
    model = onnx.load(source, load_external_data=False)
    twin = model.graph.initializer.add()
    twin.CopyFrom(model.graph.initializer[0])
    twin.name = "twin"
    graphs.save_model(model, source)
    (tmp_path / "out").mkdir()
    import_graph(source, tmp_path / "out", outside=True)
    imported = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    places = {t.name: [e.value for e in t.external_data] for t in imported.graph.initializer}
    assert places["twin"] == places["w1"]


def test_missing_weights_are_reported(tmp_path: Path) -> None:
    source = graphs.save_model(graphs.two_layer_classifier(), tmp_path / "any.onnx", "weights.bin")
    (tmp_path / "weights.bin").unlink()
    (tmp_path / "out").mkdir()
    with raises_code("unreadable-file", InputError):
        import_graph(source, tmp_path / "out", outside=True)
