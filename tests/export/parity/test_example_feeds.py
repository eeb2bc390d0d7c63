import numpy as np
import pytest

from smelt.export.parity.parity_samples import EXAMPLE_LENGTHS, example_feeds
from smelt.runtimes.onnx_session import open_onnx_session
from tests.support.graphs import graph_exports

TOKENS = np.array([7, 8, 9, 11, 13])


@pytest.mark.parametrize(
    ("family", "graph", "calls"),
    [("marian", "encoder_model", 1), ("marian", "decoder_with_past_model", 1), ("bert", "model", 1),
     ("gpt2", "model", 2)],
)  # fmt: skip
def test_every_graph_runs_on_padded_rows_of_different_tokens(family, graph, calls):
    session = open_onnx_session(graph_exports.exported_graphs(family, "fp32").folder / f"{graph}.onnx", 1)
    feeds = example_feeds(session, TOKENS)
    assert len(feeds) == calls
    for feed in feeds:
        assert set(feed) == {i.name for i in session.get_inputs()}
        session.run(None, feed)
        name = next(n for n in feed if n.endswith("attention_mask"))
        assert sorted(feed[name].sum(axis=1)) == sorted(EXAMPLE_LENGTHS)
        assert set(feed["input_ids"].ravel()) <= set(TOKENS)
        assert len(set(feed["input_ids"].ravel())) > 1
        for cache in (v for n, v in feed.items() if n.startswith("past_key_values") and v.size):
            assert cache.std() > 0.5


def test_language_model_feeds_are_left_padded_prompt_and_cached_step():
    session = open_onnx_session(graph_exports.exported_graphs("gpt2", "fp32").folder / "model.onnx", 1)
    prompt, step = example_feeds(session, TOKENS)
    assert prompt["past_key_values.0.key"].shape[2] == 0
    assert step["past_key_values.0.key"].shape[2] == max(EXAMPLE_LENGTHS) - 1
    assert (np.diff(prompt["attention_mask"], axis=1) >= 0).all()
    assert prompt["position_ids"].max(axis=1).tolist() == [n - 1 for n in EXAMPLE_LENGTHS]
    assert step["position_ids"][:, 0].tolist() == [n - 1 for n in EXAMPLE_LENGTHS]


def test_num_logits_to_keep_inputs_are_all_and_one():
    exported = graph_exports.exported_graphs("gpt2", "fp32", "tensorrt")
    session = open_onnx_session(exported.folder / "model.onnx", 1)
    feeds = example_feeds(session, TOKENS)
    num_logits = [int(f["num_logits_to_keep"]) for f in feeds]
    assert num_logits == [0, 1, 0]
    lengths = [session.run(["logits"], f)[0].shape[1] for f in feeds]
    assert lengths == [max(EXAMPLE_LENGTHS), 1, 1]
