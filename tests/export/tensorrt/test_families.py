"""Every family of models leaves as graphs of which a real TensorRT builder makes engines.

Export and profiles as in a recipe; the engines are built on the rig (see processes/tensorrt_rig.py).
"""

from pathlib import Path
from typing import Any

import onnx
import pytest

from smelt.models.families import registry
from tests.support.graphs import graph_exports, tensorrt_graphs
from tests.support.models import embedders
from tests.support.pairs import matrix
from tests.support.processes import tensorrt_rig

ROOT = Path(__file__).resolve().parents[3]
EVERYDAY = list(tensorrt_graphs.COMMON_FAMILIES)
FAMILIES = list(tensorrt_graphs.GRAPH_COUNTS) if matrix.is_full_matrix() else EVERYDAY
# fp16 here is each constant narrowed, in a second; what the stage leaves, which takes a trace, follows below
SOME = EVERYDAY if matrix.is_full_matrix() else ["marian", "t5", "llama", "embedder"]
CASES = matrix.matrix_cells(SOME, ["fp32", "fp16"])
CASES += [(family, "fp32") for family in FAMILIES if family not in EVERYDAY]


def test_every_family_has_graphs_and_documentation_row() -> None:
    page = (ROOT / "docs" / "reference" / "stages" / "tensorrt.md").read_text(encoding="utf-8")
    embedding = {
        name for name, family_info in registry.FAMILIES.items() if embedders.TASK in family_info.tasks
    }
    built = {
        name
        for name, family_info in registry.FAMILIES.items()
        if not family_info.towers and family_info.input_kind != "audio"
    }
    assert built | {f"embedder-{name}" for name in embedding - {"bert"}} | {"embedder"} == set(
        tensorrt_graphs.GRAPH_COUNTS
    )
    assert [name for name in sorted(built) if f"|`{name}`|" not in page] == []
    assert set(embedders.FAMILIES) == embedding


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_family_engines_build_in_each_precision(family: str, dtype: str, tmp_path: Path) -> None:
    tensorrt_rig.rig_environment()
    fp32_folder = tensorrt_graphs.exported_folder(family)
    folder = (
        fp32_folder if dtype == "fp32" else tensorrt_graphs.copy_graphs(family, tmp_path / "half", half=True)
    )
    graphs = tensorrt_graphs.graphs_with_shapes(family, folder)
    assert len(graphs) == tensorrt_graphs.GRAPH_COUNTS[family]
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes", 0) > weights(path), (path.name, answer)
        assert not [warning for warning in answer["warnings"] if "profile" in warning["message"]]
        assert dtype == "fp32" or weights(path) < 0.6 * weights(fp32_folder / path.name)


def weights(path: Path) -> int:
    """Return the bytes of the floating initializers of a graph."""
    initializers: Any = onnx.load(path).graph.initializer
    float_types = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}
    return sum(len(t.raw_data) for t in initializers if t.data_type in float_types)


# what `onnx: {dtype: ...}` leaves: norms stay float32, and what overflows in float16
# Qwen3 norms each head's queries and keys too
KEPT = [("bert", "bf16"), ("qwen3", "fp16")]
WITH_BF16 = ("marian", "t5", "bart", "roberta", "embedder", "gpt2", "llama", "bert")
if matrix.is_full_matrix():
    KEPT = [(family, "fp16") for family in FAMILIES]
    KEPT += [(family, "bf16") for family in WITH_BF16]


@pytest.mark.parametrize(("family", "dtype"), KEPT)
def test_graphs_with_float32_norms_build(family: str, dtype: str) -> None:
    tensorrt_rig.rig_environment()
    graphs = tensorrt_graphs.graphs_with_shapes(
        family, graph_exports.exported_graphs(family, "fp32", "tensorrt", dtype).folder
    )
    assert len(graphs) == tensorrt_graphs.GRAPH_COUNTS[family]
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes"), (path.name, answer)
        assert answer["types"]["FLOAT"] > 0
        assert answer["types"]["BF16" if dtype == "bf16" else "HALF"] > answer["types"]["FLOAT"]
        assert answer["warnings"] == []  # of norms in fp16 it warns


TWO = [{"max_batch_size": 1, "lengths": {"opt": 1, "max": 1}}, {"length_percentile": 100}]


@pytest.mark.parametrize("family", ["marian", "llama"] if matrix.is_full_matrix() else ["marian"])
def test_engines_build_with_several_profiles(family: str) -> None:
    """Single tokens or texts of one row, and all else: what the sums and shared sizes of each must fit."""
    tensorrt_rig.rig_environment()
    graphs = tensorrt_graphs.graphs_with_shapes(family, tensorrt_graphs.exported_folder(family), profiles=TWO)
    assert all(len(profiles) == 2 for profiles in graphs.values())
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes", 0) > weights(path), (path.name, answer)
        assert not [warning for warning in answer["warnings"] if "profile" in warning["message"]]
