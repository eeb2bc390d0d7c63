"""The layouts of a translator's decoder that others know, made of smelt's two graphs: names and numbers."""

import numpy as np
import onnx
import pytest

from smelt.core.errors import RunError
from smelt.export.graph_files import read_graph
from smelt.export.package.optimum import optimum_graphs
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts, graph_exports, translator_graphs

FOLDERS = {
    "marian": lambda: exported_artifacts.exported_artifact("translator"),
    "t5": lambda: exported_artifacts.exported_artifact("t5"),
    "bart": lambda: graph_exports.exported_graphs("bart", "fp32").folder,
    "marian int8": lambda: graph_exports.exported_graphs("marian", "int8").folder,
    "t5 static": lambda: graph_exports.exported_graphs("t5", "static").folder,
}
LAYERS = 2


def graphs(kind):
    return [read_graph(FOLDERS[kind]() / f"{n}.onnx") for n in ("encoder_model", "decoder_with_past_model")]


def names(values):
    return [value.name for value in values]


def caches(prefix, kinds=("decoder", "encoder")):
    return [f"{prefix}.{i}.{k}.{p}" for i in range(LAYERS) for k in kinds for p in ("key", "value")]


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_layout_equals_smelt_logits(kind):
    encoder, decoder = graphs(kind)
    layout = optimum_graphs(encoder, decoder)
    expected = translator_graphs.run_smelt_graphs(encoder, decoder)
    for outputs in (
        translator_graphs.run_optimum_graphs(layout.encoder, layout.decoder, layout.decoder_with_past),
        translator_graphs.run_merged_graph(layout.encoder, layout.merged_decoder),
    ):
        for expected_logits, logits in zip(expected, outputs, strict=True):
            np.testing.assert_allclose(logits[:, 0], expected_logits, rtol=0, atol=1e-5)
    assert not np.allclose(expected[1], expected[2], atol=1e-3)  # the steps differ, so their caches matter


def test_names_and_order_match_optimum():
    layout = optimum_graphs(*graphs("marian int8"))
    assert names(layout.encoder.graph.input) == ["input_ids", "attention_mask"]
    assert names(layout.encoder.graph.output) == ["last_hidden_state"]
    states = ["input_ids", "encoder_attention_mask", "encoder_hidden_states"]
    assert names(layout.decoder.graph.input) == states
    assert names(layout.decoder.graph.output) == ["logits", *caches("present")]
    assert names(layout.decoder_with_past.graph.input) == [*states[:2], *caches("past_key_values")]
    assert names(layout.decoder_with_past.graph.output) == ["logits", *caches("present", ["decoder"])]
    inputs = [*states[:2], *caches("past_key_values"), states[2], "use_cache_branch"]
    assert names(layout.merged_decoder.graph.input) == inputs
    assert names(layout.merged_decoder.graph.output) == ["logits", *caches("present")]


def test_cross_attention_nodes_are_moved_out_of_encoder():
    encoder, decoder = graphs("marian")
    layout = optimum_graphs(encoder, decoder)
    assert len(layout.encoder.graph.node) < len(encoder.graph.node)
    assert len(layout.encoder.graph.initializer) < len(encoder.graph.initializer)
    for model in (layout.encoder, layout.decoder, layout.decoder_with_past, layout.merged_decoder):
        onnx.checker.check_model(model)
        for value in (*model.graph.input, *model.graph.output):
            assert value.type.tensor_type.shape.dim[0].dim_param in ("batch_size", "")


def test_input_graphs_are_not_modified():
    encoder, decoder = graphs("marian")
    model_bytes = [encoder.SerializeToString(), decoder.SerializeToString()]
    optimum_graphs(encoder, decoder)
    assert [encoder.SerializeToString(), decoder.SerializeToString()] == model_bytes


def test_keys_not_computed_from_hidden_states_are_rejected():
    encoder, decoder = graphs("marian")
    graph = encoder.graph
    key = next(node for node in graph.node if "present.0.encoder.key" in node.output)
    gathered = onnx.helper.make_node("Gather", ["encoder.embed_tokens.weight", "input_ids"], ["more"], "odd")
    added = onnx.helper.make_node("Add", ["more", key.input[0]], ["odd.sum"], "sum")
    key.input[0] = "odd.sum"
    key_index = list(graph.node).index(key)
    nodes = [*graph.node[:key_index], gathered, added, *graph.node[key_index:]]
    del graph.node[:]
    graph.node.extend(nodes)
    with raises_code("unsupported-graph", RunError) as excinfo:
        optimum_graphs(encoder, decoder)
    assert "'odd' (Gather)" in str(excinfo.value)
