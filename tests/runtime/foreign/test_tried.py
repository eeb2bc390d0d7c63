"""A graph from elsewhere is opened within limits before anything opens it here, and only once."""

import itertools
import json

import foreign_graphs
import pytest
from onnx import helper

import smelt
from smelt.core.artifact import read_artifact
from smelt.core.errors import InputError
from smelt.core.files import sha256_of
from smelt.runtime.foreign import tried
from smelt.runtime.foreign.tried import note_tried, require_safe
from smelt.use.arrays import predicted_lines
from smelt.use.eval import evaluate_artifact


@pytest.fixture(autouse=True)
def _own_records(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _swapped(folder, model):
    """Put another graph into an artifact, as somebody would who also writes its manifest."""
    foreign_graphs.save(model, folder / "model.onnx")
    said = json.loads((folder / "manifest.json").read_text())
    path = folder / "model.onnx"
    said["files"]["model.onnx"] = {"sha256": sha256_of(path), "size_bytes": path.stat().st_size}
    (folder / "manifest.json").write_text(json.dumps(said))
    return read_artifact(folder)


def test_a_graph_that_asks_for_gigabytes_is_refused_by_all_that_would_open_it(tmp_path):
    folder = foreign_graphs.artifact(tmp_path / "a", foreign_graphs.two_layers()).path
    artifact = _swapped(folder, foreign_graphs.bomb())
    rows = foreign_graphs.rows(tmp_path / "rows.npz")
    openers = [
        lambda: require_safe(artifact),
        lambda: smelt.load(folder),
        lambda: list(predicted_lines(folder, rows, False, 1, "cpu", 8)),
        lambda: evaluate_artifact(folder, str(rows)),
    ]
    for opener in openers:
        with pytest.raises(InputError) as error:
            opener()
        assert error.value.code == "unsafe-graph"


def test_a_graph_is_tried_once(tmp_path, monkeypatch):
    artifact = foreign_graphs.artifact(tmp_path / "a", foreign_graphs.two_layers())
    asked = []
    monkeypatch.setattr(tried, "ask", lambda module, arguments, limits: asked.append(arguments))
    require_safe(artifact)
    require_safe(artifact)
    assert asked == [[str(artifact.path / "model.onnx")]]
    other = _swapped(artifact.path, foreign_graphs.two_layers(seed=1))
    require_safe(other)
    assert len(asked) == 2


def test_what_was_made_here_is_opened_at_once(tmp_path, monkeypatch):
    artifact = foreign_graphs.artifact(tmp_path / "a", foreign_graphs.two_layers())
    monkeypatch.setattr(tried, "ask", lambda *_: pytest.fail("it was tried"))
    note_tried(artifact.manifest.files)
    require_safe(artifact)


def test_weights_that_several_graphs_share_count_for_each(tmp_path):
    """Graphs of one artifact may have their weights in one file, which none of them is named like."""
    from smelt.core.artifact import FileRecord
    from smelt.runtime.foreign.trial import COPIES

    graphs = [tmp_path / "generate.onnx", tmp_path / "model.onnx"]
    for graph in graphs:
        graph.write_bytes(b"0")
    files = {g.name: FileRecord(sha256="0", size_bytes=1) for g in graphs}
    large = files | {"model.onnx_data": FileRecord(sha256="0", size_bytes=3_000_000_000)}
    small, limits = (tried._limits(graphs, found) for found in (files, large))
    assert limits.memory_bytes - small.memory_bytes == COPIES * 3_000_000_000
    assert limits.seconds > small.seconds + 100


def test_a_graph_of_large_fixed_inputs_may_use_what_these_need(tmp_path):
    """20 layers of 64 MB each, and all of them in one, for rows that are as large by the graph's own word."""
    names = ["x", *(f"x{at}" for at in range(20))]
    nodes = [helper.make_node("Relu", [one], [two]) for one, two in itertools.pairwise(names)]
    nodes.append(helper.make_node("Concat", names, ["y"], axis=0))
    ends = [foreign_graphs.value("x", [1, 16_000_000])], [foreign_graphs.value("y", [21, 16_000_000])]
    artifact = foreign_graphs.artifact(tmp_path / "a", foreign_graphs.model_of(nodes, *ends))
    require_safe(artifact)


@pytest.mark.parametrize("lack", [PermissionError("/root/.cache"), RuntimeError("no home directory")])
def test_a_home_that_cannot_be_used_is_no_reason_not_to_open(tmp_path, monkeypatch, lack):
    def home(*_):
        raise lack

    artifact = foreign_graphs.artifact(tmp_path / "a", foreign_graphs.two_layers())
    monkeypatch.setattr(tried, "_record", home)
    monkeypatch.setattr(tried, "ask", lambda *_: None)
    require_safe(artifact)


def test_without_a_place_to_remember_each_opening_is_tried(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    artifact = foreign_graphs.artifact(tmp_path / "a", foreign_graphs.two_layers())
    asked = []
    monkeypatch.setattr(tried, "ask", lambda *arguments: asked.append(arguments))
    require_safe(artifact)
    require_safe(artifact)
    assert len(asked) == 2
