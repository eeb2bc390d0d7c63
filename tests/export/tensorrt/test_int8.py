"""int8 with ranges of its own reaches engines: explicit Q/DQ in the file, int8 in network and engine."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from smelt.export.graph_files import write_graph
from smelt.export.graphs.attention import GraphSpec
from smelt.export.graphs.export_graph import export_graph
from smelt.export.simplify_graph import expand_placeholders
from tests.support import schemes
from tests.support.graphs import graph_exports, tensorrt_graphs
from tests.support.pairs import matrix
from tests.support.processes import tensorrt_rig

WIDE = 1024


# a decoder alone; else all
CODED = [
    family for family in tensorrt_graphs.GRAPH_COUNTS if family not in tensorrt_graphs.CONVOLUTIONAL
]  # which has no products to code
FAMILIES = CODED if matrix.is_full_matrix() else ["llama"]
CASES = [(family, dtype) for family in FAMILIES for dtype in ("fp32", "fp16")]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_family_engines_build_with_int8_matmuls(family: str, dtype: str) -> None:
    tensorrt_rig.rig_environment()
    folder = graph_exports.exported_graphs(family, "symmetric static", "tensorrt", dtype).folder
    graphs = tensorrt_graphs.graphs_with_shapes(family, folder)
    assert len(graphs) == tensorrt_graphs.GRAPH_COUNTS[family]
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes"), (path.name, answer)
        pairs = sum(n.op_type == "QuantizeLinear" for n in onnx.load(path).graph.node)
        # what quantizes activations, and the codes of each matrix
        assert answer["types"].get("INT8", 0) >= 2 * pairs > 5
        assert (answer["types"].get("HALF", 0) > answer["types"]["FLOAT"]) == (dtype == "fp16")


def test_engine_stores_weights_as_int8(tmp_path: Path) -> None:
    tensorrt_rig.rig_environment()
    linear_layers = [nn.Linear(WIDE, WIDE) for _ in range(3)]
    symmetric = {"activations_symmetric": True}
    graphs = {write(tmp_path / "float.onnx", linear_layers): SHAPES}
    graphs[
        write(
            tmp_path / "int8.onnx",
            [schemes.with_activation_range(m, "int8-static", symmetric) for m in linear_layers],
        )
    ] = SHAPES
    float_engine, codes = tensorrt_rig.build_all(graphs)
    assert float_engine["types"].get("INT8", 0) == 0
    saved_bytes = float_engine["bytes"] - codes["bytes"]
    assert saved_bytes > 0.8 * 3 * 3 * WIDE * WIDE, (float_engine, codes)  # 3 bytes less of each weight


SHAPES = {"x": ((1, WIDE), (8, WIDE), (16, WIDE))}


def write(path: Path, layers: list[nn.Module]) -> Path:
    module = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    module.attentions = ()  # type: ignore[assignment]
    graph = GraphSpec("model", module.eval(), (torch.ones(2, WIDE),), ["x"], ["y"], ({0: "rows"},))
    model = export_graph(graph, "tensorrt", 20)
    expand_placeholders(model)
    write_graph(model, path)
    return path
