"""The first layer that differs is the one that was changed, in every kind of graph."""

import shutil

import numpy as np
import onnx
import pytest

from smelt.export.parity.check_parity import locate_first_mismatch
from smelt.export.parity.references import dequantize_graph
from tests.support.graphs import graph_exports
from tests.support.graphs.graph_edits import insert_after_node
from tests.support.pairs.matrix import matrix_cells

# a product or norm somewhere in the middle, by a constant that its last node reads
PLACES = {
    ("marian", "encoder_model"): "encoder.layers.1.fc2.bias",
    ("marian", "decoder_with_past_model"): "decoder.layers.1.encoder_attn.out_proj.bias",
    ("bert", "model"): "model.bert.encoder.layer.1.attention.output.LayerNorm.bias",
    ("gpt2", "model"): "model.transformer.h.1.mlp.c_fc.bias",
    ("opt", "model"): "model.model.decoder.layers.1.fc1.bias",  # which is fed [texts * tokens, width]
}


def asked(family, scheme, graph, folder, change):
    """Return the place found in a copy of the graphs, in float32, one of which is changed."""
    exported = graph_exports.exported_graphs(family, scheme)
    shutil.copytree(exported.folder, folder)
    for path in folder.glob("*.onnx"):
        model = onnx.load(path)
        if path.stem == graph:
            change(model)
        dequantize_graph(model)
        onnx.save(model, path)
    (differing,) = (candidate for candidate in exported.subject.graphs if candidate.name == graph)
    return locate_first_mismatch(folder, differing, exported.subject.model, exported.reference)


@pytest.mark.parametrize(("case", "scheme"), matrix_cells(list(PLACES), ["fp32", "int8", "binary"]))
def test_changed_layer_and_node_are_located(case, scheme, tmp_path):
    family, graph = case
    constant = PLACES[case]
    names = []

    def change(model):
        node = [n for n in model.graph.node if constant in n.input][-1]
        names.append(node.name)
        insert_after_node(model, node, "Mul", np.float32(1.01))

    mismatch = asked(family, scheme, graph, tmp_path / "x", change)
    layer = constant.removesuffix(".bias")
    # what is multiplied comes after the node: the layer after it is the first that is fed something else
    assert mismatch is not None
    assert mismatch.layer != layer

    def scale(model):
        tensor = next(t for t in model.graph.initializer if t.name == constant)
        values = onnx.numpy_helper.to_array(tensor) + 1
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, constant))

    assert asked(family, scheme, graph, tmp_path / "y", scale) == (layer, names[0])


def test_equal_or_unrunnable_graph_has_no_mismatch_location(tmp_path):
    assert asked("marian", "fp32", "encoder_model", tmp_path / "x", lambda model: None) is None

    def cut(model):
        model.graph.node[5].input[0] = "nowhere"

    assert asked("marian", "fp32", "encoder_model", tmp_path / "y", cut) is None
