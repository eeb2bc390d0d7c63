"""Every family of models leaves as graphs of which a real TensorRT builder makes engines.

Export and profiles as in a recipe; the engines are built on the rig (see processes/tensorrt_rig.py).
"""

from pathlib import Path
from typing import Any

import exports
import matrix
import onnx
import pytest
import tensorrt_graphs
import tensorrt_rig


def both(family: str) -> bool:
    """Seq2seq with the most kinds of inputs, and decoder-only."""
    return family in ("marian", "llama")


FAMILIES = list(tensorrt_graphs.GRAPHS) if matrix.whole() else list(tensorrt_graphs.EVERYDAY)


@pytest.mark.parametrize(("family", "dtype"), matrix.cells(FAMILIES, ["fp32", "fp16"], full=both))
def test_engines_of_the_family_are_built_in_each_precision(family: str, dtype: str, tmp_path: Path) -> None:
    tensorrt_rig.require()
    whole = tensorrt_graphs.exported(family)
    folder = whole if dtype == "fp32" else tensorrt_graphs.copy(family, tmp_path / "half", half=True)
    graphs = tensorrt_graphs.planned(family, folder)
    assert len(graphs) == tensorrt_graphs.GRAPHS[family]
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes", 0) > weights(path), (path.name, answer)
        assert not [line for line in answer["warnings"] if "profile" in line]
        assert dtype == "fp32" or weights(path) < 0.6 * weights(whole / path.name)


def weights(path: Path) -> int:
    """Return the bytes of the floating initializers of a graph."""
    initializers: Any = onnx.load(path).graph.initializer
    kinds = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}
    return sum(len(t.raw_data) for t in initializers if t.data_type in kinds)


@pytest.mark.parametrize(("family", "dtype"), [("bert", "bf16"), ("llama", "fp16")])
def test_engines_are_built_of_graphs_in_which_norms_stay_float32(family: str, dtype: str) -> None:
    tensorrt_rig.require()
    graphs = tensorrt_graphs.planned(family, exports.exported(family, "fp32", "tensorrt", dtype).folder)
    for answer in tensorrt_rig.build_all(graphs):
        assert answer["types"]["FLOAT"] > 0
        assert answer["types"]["BF16" if dtype == "bf16" else "HALF"] > answer["types"]["FLOAT"]
        assert answer["warnings"] == []  # of norms in fp16 it warns


TWO = [{"max_batch_size": 1, "lengths": {"opt": 1, "max": 1}}, {"length_percentile": 100}]


@pytest.mark.parametrize("family", ["marian", "llama"])
def test_engines_are_built_with_several_profiles(family: str) -> None:
    """Single tokens or texts of one row, and all else: what the sums and shared sizes of each must fit."""
    tensorrt_rig.require()
    graphs = tensorrt_graphs.planned(family, tensorrt_graphs.exported(family), profiles=TWO)
    assert all(len(profiles) == 2 for profiles in graphs.values())
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes", 0) > weights(path), (path.name, answer)
        assert not [line for line in answer["warnings"] if "profile" in line]
