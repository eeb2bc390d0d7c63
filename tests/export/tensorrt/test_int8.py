"""int8 with ranges of its own reaches engines: explicit Q/DQ in the file, int8 in network and engine."""

from pathlib import Path

import exports
import matrix
import onnx
import pytest
import schemes
import tensorrt_graphs
import tensorrt_rig
import torch
from torch import nn

from smelt.export.graph_files import write_graph
from smelt.export.graphs.graph import Graph
from smelt.export.graphs.of_model import export_graph
from smelt.export.load_time import spell_out

WIDE = 1024


# an encoder that classifies, an encoder with a decoder and its cache, a decoder alone; else all
CODED = [family for family in tensorrt_graphs.GRAPHS if family != "resnet"]  # which has no products to code
FAMILIES = CODED if matrix.whole() else ["bert", "llama"]


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_of_a_family_are_built_with_int8_products(family: str) -> None:
    tensorrt_rig.require()
    folder = exports.exported(family, "static", "tensorrt").folder
    graphs = tensorrt_graphs.planned(family, folder)
    assert len(graphs) == tensorrt_graphs.GRAPHS[family]
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes"), (path.name, answer)
        pairs = sum(n.op_type == "QuantizeLinear" for n in onnx.load(path).graph.node)
        # what quantizes activations, and the codes of each matrix
        assert answer["types"].get("INT8", 0) >= 2 * pairs > 5


def test_an_engine_holds_the_weights_as_bytes(tmp_path: Path) -> None:
    tensorrt_rig.require()
    wide = [nn.Linear(WIDE, WIDE) for _ in range(3)]
    graphs = {write(tmp_path / "float.onnx", wide): SHAPES}
    graphs[write(tmp_path / "int8.onnx", [schemes.observing(m, "int8-static") for m in wide])] = SHAPES
    whole, codes = tensorrt_rig.build_all(graphs)
    assert whole["types"].get("INT8", 0) == 0
    saved = whole["bytes"] - codes["bytes"]
    assert saved > 0.8 * 3 * 3 * WIDE * WIDE, (whole, codes)  # 3 bytes less of each weight


SHAPES = {"x": ((1, WIDE), (8, WIDE), (16, WIDE))}


def write(path: Path, layers: list[nn.Module]) -> Path:
    module = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    module.attentions = ()  # type: ignore[assignment]
    graph = Graph("model", module.eval(), (torch.ones(2, WIDE),), ["x"], ["y"], ({0: "rows"},))
    made = export_graph(graph, "tensorrt", 20)
    spell_out(made)
    write_graph(made, path)
    return path
