"""The copy of a graph computes what the original does, wherever its weights lay."""

from pathlib import Path

import foreign_graphs as graphs
import numpy as np
import onnx
import onnxruntime
from refusals import refused

from smelt.core.errors import InputError
from smelt.runtime.foreign.take import take_graph

X = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


def outputs(path: Path) -> np.ndarray:
    return onnxruntime.InferenceSession(str(path)).run(None, {"x": X})[0]


def test_a_graph_with_its_weights_inside_is_the_same_file(tmp_path: Path) -> None:
    source = graphs.save(graphs.two_layers(), tmp_path / "any.onnx")
    (tmp_path / "out").mkdir()
    assert take_graph(source, tmp_path / "out", outside=False).read_bytes() == source.read_bytes()


def test_weights_of_another_name_are_gathered_in_one_file(tmp_path: Path) -> None:
    source = graphs.save(graphs.two_layers(), tmp_path / "any.onnx", "manifest.json")
    (tmp_path / "out").mkdir()
    taken = take_graph(source, tmp_path / "out", outside=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.onnx", "model.onnx_data"]
    np.testing.assert_array_equal(outputs(taken), outputs(source))


def test_a_stretch_that_two_tensors_share_is_copied_once(tmp_path: Path) -> None:
    source = graphs.save(graphs.two_layers(), tmp_path / "any.onnx", "weights.bin")
    model = onnx.load(source, load_external_data=False)
    twin = model.graph.initializer.add()
    twin.CopyFrom(model.graph.initializer[0])
    twin.name = "twin"
    graphs.save(model, source)
    (tmp_path / "out").mkdir()
    take_graph(source, tmp_path / "out", outside=True)
    taken = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    places = {t.name: [e.value for e in t.external_data] for t in taken.graph.initializer}
    assert places["twin"] == places["w1"]


def test_weights_that_went_away_are_said(tmp_path: Path) -> None:
    source = graphs.save(graphs.two_layers(), tmp_path / "any.onnx", "weights.bin")
    (tmp_path / "weights.bin").unlink()
    (tmp_path / "out").mkdir()
    with refused("unreadable-file", InputError):
        take_graph(source, tmp_path / "out", outside=True)
