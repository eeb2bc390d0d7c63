"""A graph is tried with the names and texts that it has, in a process of its own."""

from pathlib import Path

import foreign_graphs as graphs
import numpy as np
import pytest
from onnx import TensorProto, helper
from refusals import refused

from smelt.core.errors import InputError
from smelt.runtime.foreign.trial import answer, limits_for, try_graph


def test_an_input_may_have_any_name(tmp_path: Path) -> None:
    """numpy.savez has its own meaning for `file` and for `allow_pickle`."""
    names = ["file", "allow_pickle", "arr_0", "a/../b:0"]
    made = graphs.model_of(
        [helper.make_node("Sum", names, ["y"])],
        [graphs.value(name, ["N", 2]) for name in names],
        [graphs.value("y", ["N", 2])],
    )
    rows = {name: np.ones((3, 2), np.float32) for name in names}
    try_graph(graphs.save(made, tmp_path / "m.onnx"), rows, "m.onnx")
    with refused("graph-failed", InputError):
        try_graph(tmp_path / "m.onnx", rows | {"file": np.ones((2, 3, 4), np.float32)}, "m.onnx")


def test_texts_come_as_texts_under_their_own_names(tmp_path: Path) -> None:
    texts, numbers = graphs.value("t", ["N"], TensorProto.STRING), graphs.value("x", ["N"])
    nodes = [helper.make_node("Identity", ["t"], ["u"]), helper.make_node("Neg", ["x"], ["y"])]
    out = [graphs.value("u", ["N"], TensorProto.STRING), graphs.value("y", ["N"])]
    path = graphs.save(graphs.model_of(nodes, [texts, numbers], out), tmp_path / "m.onnx")
    np.savez(tmp_path / "r.npz", np.array(["a", "\u00e4"]), np.ones(2, np.float32))
    rows = str(tmp_path / "r.npz")
    assert answer([str(path), rows, '["t", "x"]']) is None
    assert answer([str(path), rows, '["x", "t"]']) is not None


def test_a_small_graph_gets_little_and_what_it_is_fed_gets_more(tmp_path: Path) -> None:
    path = graphs.save(graphs.two_layers(), tmp_path / "m.onnx")
    memory, seconds = limits_for(path, {"x": np.zeros((1, 8), np.float32)})
    assert memory < 2e9
    assert seconds < 13
    wide = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (25_000_000,), (0,))
    more = limits_for(path, {"x": wide})
    assert more.seconds == pytest.approx(seconds + 100, rel=1e-3)
    assert more.memory_bytes >= memory
