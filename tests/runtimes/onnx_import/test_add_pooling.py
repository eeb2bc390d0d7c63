"""Hidden states become vectors as sentence-transformers' modules make them, by formula."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.models.text_rules import SentenceRules
from smelt.runtimes.onnx_import.import_graph import add_pooling
from smelt.runtimes.onnx_session import open_onnx_session
from tests.support.graphs import imported_graphs as graphs

IDS = np.array([[3, 4, 5], [1, 2, 0]])
MASK = np.array([[1, 1, 1], [1, 1, 0]])
WORDS = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32) - 1


def states(opset: int) -> Any:
    """Ids, a mask and types to hidden states [B, L, 5]: the words' rows, of other types others."""
    tensors = [numpy_helper.from_array(WORDS, "words"), numpy_helper.from_array(WORDS[:2] * 9, "kinds")]
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["w"], "w"),
        helper.make_node("Gather", ["kinds", "token_type_ids"], ["k"], "k"),
        helper.make_node("Add", ["w", "k"], ["last_hidden_state"], "sum"),
    ]
    size = ["batch", "length"]
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [graphs.value_info(name, size, TensorProto.INT64) for name in names]
    return graphs.make_model(
        nodes, inputs, [graphs.value_info("last_hidden_state", [*size, 5])], tensors, opset
    )


def expected(pooling: str, normalize: bool) -> Any:
    hidden = WORDS[IDS] + WORDS[0] * 9
    by_hand = {
        "cls": hidden[:, 0],
        "mean": np.stack([hidden[0].mean(0), hidden[1, :2].mean(0)]),
        "max": np.stack([hidden[0].max(0), hidden[1, :2].max(0)]),
    }[pooling]
    return by_hand / np.linalg.norm(by_hand, axis=1, keepdims=True) if normalize else by_hand


@pytest.mark.parametrize("opset", [12, 17, 18])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_vectors_equal_the_formula(pooling: Any, opset: int, tmp_path: Path) -> None:
    for normalize in (False, True):
        path = graphs.save_model(states(opset), tmp_path / "m.onnx")
        add_pooling(path, SentenceRules(pooling=pooling, normalize=normalize))
        session = open_onnx_session(path, 1)
        assert {i.name for i in session.get_inputs()} == {"input_ids", "attention_mask"}
        assert [(o.name, o.shape) for o in session.get_outputs()] == [("sentence_embedding", ["batch", 5])]
        (vectors,) = session.run(None, {"input_ids": IDS, "attention_mask": MASK})
        np.testing.assert_allclose(vectors, expected(pooling, normalize), rtol=1e-5, atol=1e-6)


def test_graph_that_returns_vectors_is_unchanged(tmp_path: Path) -> None:
    model = states(17)
    model.graph.node.append(helper.make_node("ReduceSum", ["last_hidden_state"], ["sentence_embedding"]))
    model.graph.output.append(graphs.value_info("sentence_embedding", None))
    path = graphs.save_model(model, tmp_path / "m.onnx")
    add_pooling(path, SentenceRules(pooling="cls"))
    session = open_onnx_session(path, 1)
    assert [o.name for o in session.get_outputs()] == ["last_hidden_state", "sentence_embedding"]
    vectors = session.run(["sentence_embedding"], {"input_ids": IDS, "attention_mask": MASK})[0]
    np.testing.assert_allclose(vectors.ravel(), [(WORDS[IDS] + WORDS[0] * 9).sum()], rtol=1e-5)
