"""A matrix that an embedding and a Gemm share is quantized for both of them."""

from pathlib import Path
from typing import Any

import foreign_graphs as graphs
import harness
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.core.data import split_of
from smelt.core.rows.arrays import Arrays
from smelt.export.foreign.quantize import QuantizeGraph, QuantizeGraphSettings
from smelt.export.foreign.tied import with_own_matrices
from smelt.runtime.backends.onnx_session import open_session


def tied() -> Any:
    """Words [N] to the scores [N, 40] of all words: one matrix [40, 8] at both ends."""
    random = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random.normal(size=(40, 8)).astype(np.float32), "words")]
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["h"], "embedding"),
        helper.make_node("Gemm", ["h", "words"], ["logits"], "head", transB=1),
    ]
    ids, logits = graphs.value("ids", ["N"], TensorProto.INT64), graphs.value("logits", ["N", 40])
    return graphs.model_of(nodes, [ids], [logits], weights)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_the_embedding_is_not_read_by_its_columns(scheme: str, tmp_path: Path) -> None:
    source = graphs.artifact(tmp_path / "src", tied())
    ids = np.arange(24)
    ctx = harness.run(
        QuantizeGraph(), QuantizeGraphSettings(scheme=scheme), source, tmp_path / "out",
        data={"calibration": split_of("rows.npz", Arrays({"ids": ids}, len(ids)))},
    )  # fmt: skip
    found, wanted = (
        open_session(folder / "model.onnx", 1).run(None, {"ids": ids})[0]
        for folder in (tmp_path / "out", source.path)
    )
    assert np.abs(found - wanted).max() < 0.05 * wanted.std()
    assert ctx.facts["parity"]["relative"] < 0.05


def test_a_graph_that_shares_nothing_is_taken_as_it_is(tmp_path: Path) -> None:
    path = graphs.save(graphs.two_layers(), tmp_path / "m.onnx")
    assert with_own_matrices(path, tmp_path / "new") == path
    other = graphs.save(tied(), tmp_path / "t.onnx")
    (tmp_path / "new").mkdir()
    assert len(onnx.load(with_own_matrices(other, tmp_path / "new")).graph.initializer) == 2
