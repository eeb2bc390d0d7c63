"""An embedder's hidden states as an output: pooled by hand they are its vectors."""

import numpy as np
import onnx

from smelt.core.errors import RunError
from smelt.export.graph_files import read_graph
from smelt.export.package.optimum import add_hidden_states_output
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts, translator_graphs


def test_pooled_hidden_states_equal_embeddings():
    model = read_graph(exported_artifacts.exported_artifact("embedder") / "model.onnx")
    add_hidden_states_output(model)
    onnx.checker.check_model(model)
    session = translator_graphs.open_session(model)
    assert [o.name for o in session.get_outputs()] == ["sentence_embedding", "last_hidden_state"]
    mask = translator_graphs.MASK
    vectors, hidden = session.run(None, {"input_ids": translator_graphs.IDS, "attention_mask": mask})
    assert hidden.shape == (*mask.shape, vectors.shape[1])
    weights = mask / mask.sum(1, keepdims=True)
    pooled = (weights[..., None] * hidden).sum(1)
    pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(pooled, vectors, rtol=0, atol=1e-6)


def test_graph_without_norm_is_rejected():
    model = read_graph(exported_artifacts.exported_artifact("embedder") / "model.onnx")
    for node in model.graph.node:
        node.op_type = node.op_type.replace("LayerNormalization", "Identity")
    with raises_code("unsupported-graph", RunError):
        add_hidden_states_output(model)
