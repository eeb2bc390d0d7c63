"""A graph from elsewhere is opened within limits before anything opens it here, and only once."""

import itertools
import json

import pytest
from onnx import helper

import smelt
from smelt.api.array_models import prediction_lines
from smelt.api.evaluate import evaluate_artifact
from smelt.core.artifact import read_artifact
from smelt.core.errors import InputError
from smelt.core.files import sha256_of, write_hashed_json
from smelt.runtimes.onnx_import import trial_run
from smelt.runtimes.onnx_import.trial_run import record_verified_graphs, require_safe_artifact
from tests.support.graphs import imported_graphs


@pytest.fixture(autouse=True)
def _own_records(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _swapped(folder, model):
    """Put another graph into an artifact, as somebody would who also writes its manifest."""
    imported_graphs.save_model(model, folder / "model.onnx")
    content = json.loads((folder / "manifest.json").read_text())
    path = folder / "model.onnx"
    content["files"]["model.onnx"] = {"sha256": sha256_of(path), "size_bytes": path.stat().st_size}
    write_hashed_json(folder / "manifest.json", content)
    return read_artifact(folder)


def test_graph_allocating_gigabytes_is_refused_by_all_commands(tmp_path):
    folder = imported_graphs.make_artifact(tmp_path / "a", imported_graphs.two_layer_classifier()).path
    artifact = _swapped(folder, imported_graphs.huge_constant_model())
    rows = imported_graphs.write_rows(tmp_path / "rows.npz")
    openers = [
        lambda: require_safe_artifact(artifact),
        lambda: smelt.load(folder),
        lambda: list(prediction_lines(folder, rows, False, 1, "cpu", 8)),
        lambda: evaluate_artifact(folder, str(rows)),
    ]
    for opener in openers:
        with pytest.raises(InputError) as error:
            opener()
        assert error.value.code == "unsafe-graph"


def test_graph_is_tried_once(tmp_path, monkeypatch):
    artifact = imported_graphs.make_artifact(tmp_path / "a", imported_graphs.two_layer_classifier())
    trials = []
    monkeypatch.setattr(trial_run, "run_isolated", lambda module, arguments, limits: trials.append(arguments))
    require_safe_artifact(artifact)
    require_safe_artifact(artifact)
    assert trials == [[str(artifact.path / "model.onnx")]]
    other = _swapped(artifact.path, imported_graphs.two_layer_classifier(seed=1))
    require_safe_artifact(other)
    assert len(trials) == 2


def test_own_artifacts_are_opened_without_a_trial(tmp_path, monkeypatch):
    artifact = imported_graphs.make_artifact(tmp_path / "a", imported_graphs.two_layer_classifier())
    monkeypatch.setattr(trial_run, "run_isolated", lambda *_: pytest.fail("it was tried"))
    record_verified_graphs(artifact.manifest.files)
    require_safe_artifact(artifact)


def test_shared_weights_count_for_each_graph(tmp_path):
    """Graphs of one artifact may have their weights in one file, which none of them is named like."""
    from smelt.core.artifact import FileRecord
    from smelt.runtimes.onnx_import.trial_run import WEIGHT_COPIES

    graphs = [tmp_path / "generate.onnx", tmp_path / "model.onnx"]
    for graph in graphs:
        graph.write_bytes(b"0")
    files = {g.name: FileRecord(sha256="0" * 64, size_bytes=1) for g in graphs}
    large = files | {"model.onnx_data": FileRecord(sha256="0" * 64, size_bytes=3_000_000_000)}
    small, limits = (trial_run._trial_limits(graphs, group) for group in (files, large))
    assert limits.memory_bytes - small.memory_bytes == WEIGHT_COPIES * 3_000_000_000
    assert limits.seconds > small.seconds + 100


def test_limit_includes_large_fixed_inputs(tmp_path):
    """20 layers of 64 MB each, and all of them in one, for rows that are as large by the graph's own word."""
    names = ["x", *(f"x{index}" for index in range(20))]
    nodes = [
        helper.make_node("Relu", [input_name], [output_name])
        for input_name, output_name in itertools.pairwise(names)
    ]
    nodes.append(helper.make_node("Concat", names, ["y"], axis=0))
    signature = (
        [imported_graphs.value_info("x", [1, 16_000_000])],
        [imported_graphs.value_info("y", [21, 16_000_000])],
    )
    artifact = imported_graphs.make_artifact(tmp_path / "a", imported_graphs.make_model(nodes, *signature))
    require_safe_artifact(artifact)


@pytest.mark.parametrize("lack", [PermissionError("/root/.cache"), RuntimeError("no home directory")])
def test_unusable_home_folder_does_not_prevent_opening(tmp_path, monkeypatch, lack):
    def home(*_):
        raise lack

    artifact = imported_graphs.make_artifact(tmp_path / "a", imported_graphs.two_layer_classifier())
    monkeypatch.setattr(trial_run, "_record_path", home)
    monkeypatch.setattr(trial_run, "run_isolated", lambda *_: None)
    require_safe_artifact(artifact)


def test_without_a_cache_each_opening_is_tried(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    artifact = imported_graphs.make_artifact(tmp_path / "a", imported_graphs.two_layer_classifier())
    trials = []
    monkeypatch.setattr(trial_run, "run_isolated", lambda *arguments: trials.append(arguments))
    require_safe_artifact(artifact)
    require_safe_artifact(artifact)
    assert len(trials) == 2
