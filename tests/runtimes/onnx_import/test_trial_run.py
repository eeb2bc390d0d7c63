"""A graph is tried with the names and texts that it has, in a process of its own."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from smelt.core.errors import InputError
from smelt.runtimes.onnx_import.trial_run import subprocess_main, trial_limits, trial_run
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs


def test_input_may_have_any_name(tmp_path: Path) -> None:
    """numpy.savez has its own meaning for `file` and for `allow_pickle`."""
    names = ["file", "allow_pickle", "arr_0", "a/../b:0"]
    model = graphs.make_model(
        [helper.make_node("Sum", names, ["y"])],
        [graphs.value_info(name, ["N", 2]) for name in names],
        [graphs.value_info("y", ["N", 2])],
    )
    rows = {name: np.ones((3, 2), np.float32) for name in names}
    trial_run(graphs.save_model(model, tmp_path / "m.onnx"), rows, "m.onnx")
    with raises_code("graph-failed", InputError):
        trial_run(tmp_path / "m.onnx", rows | {"file": np.ones((2, 3, 4), np.float32)}, "m.onnx")


def test_string_inputs_are_passed_under_their_own_names(tmp_path: Path) -> None:
    texts, numbers = graphs.value_info("t", ["N"], TensorProto.STRING), graphs.value_info("x", ["N"])
    nodes = [helper.make_node("Identity", ["t"], ["u"]), helper.make_node("Neg", ["x"], ["y"])]
    out = [graphs.value_info("u", ["N"], TensorProto.STRING), graphs.value_info("y", ["N"])]
    path = graphs.save_model(graphs.make_model(nodes, [texts, numbers], out), tmp_path / "m.onnx")
    np.savez(tmp_path / "r.npz", np.array(["a", "\u00e4"]), np.ones(2, np.float32))
    rows = str(tmp_path / "r.npz")
    assert subprocess_main([str(path), rows, '["t", "x"]']) is None
    assert subprocess_main([str(path), rows, '["x", "t"]']) is not None


def test_limits_grow_with_graph_and_inputs(tmp_path: Path) -> None:
    path = graphs.save_model(graphs.two_layer_classifier(), tmp_path / "m.onnx")
    memory, seconds = trial_limits(path, {"x": np.zeros((1, 8), np.float32)})
    assert memory < 2e9
    assert seconds < 13
    wide = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (25_000_000,), (0,))
    large_limits = trial_limits(path, {"x": wide})
    assert large_limits.seconds == pytest.approx(seconds + 100, rel=1e-3)
    assert large_limits.memory_bytes >= memory
