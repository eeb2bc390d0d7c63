"""Small graphs by hand, for tests of backends: what they answer tells what they were fed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, save

from smelt.core.errors import InputError
from smelt.generation.backend import Batch
from tests.support.expected_errors import raises_code


def write(path: Path, nodes: Any, inputs: Any, outputs: Any) -> None:
    """Write a graph; inputs and outputs: name, type, shape."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, t, s) for n, t, s in inputs],
        [helper.make_tensor_value_info(n, t, s) for n, t, s in outputs],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


INT, FLOAT = TensorProto.INT64, TensorProto.FLOAT


def token_sum_decoder(folder: Path) -> Path:
    """Write a decoder that appends its token to the cache and answers with the sum of all it was fed.

    The encoder leaves the source's ids as keys; logits[:, 0] is the sum of the cache, logits[:, 1]
    the sum of the source's keys.
    """
    (folder / "config.json").write_text(json.dumps({"is_encoder_decoder": True}))
    ids = ("input_ids", INT, ["batch", "encoder_length"])
    mask = ("attention_mask", INT, ["batch", "encoder_length"])
    cross = ["batch", 1, "encoder_length", 1]
    axes = helper.make_node("Constant", [], ["axes"], value_ints=[1, 3])
    write(
        folder / "encoder_model.onnx",
        [
            axes,
            helper.make_node("Mul", ["input_ids", "attention_mask"], ["m"]),
            helper.make_node("Cast", ["m"], ["f"], to=FLOAT),
            helper.make_node("Unsqueeze", ["f", "axes"], ["present.0.encoder.key"]),
            helper.make_node("Identity", ["f"], ["last_hidden_state"]),
        ],
        [ids, mask],
        [("last_hidden_state", FLOAT, ["batch", "encoder_length"]), ("present.0.encoder.key", FLOAT, cross)],
    )
    past = ["batch", 1, "past_length", 1]
    write(
        folder / "decoder_with_past_model.onnx",
        [
            axes,
            helper.make_node("Constant", [], ["all"], value_ints=[1, 2, 3]),
            helper.make_node("Constant", [], ["one"], value_ints=[1]),
            helper.make_node("Cast", ["input_ids"], ["f"], to=FLOAT),
            helper.make_node("Unsqueeze", ["f", "axes"], ["new"]),
            helper.make_node(
                "Concat", ["past_key_values.0.decoder.key", "new"], ["present.0.decoder.key"], axis=2
            ),
            helper.make_node("ReduceSum", ["present.0.decoder.key", "all"], ["a"], keepdims=0),
            helper.make_node("ReduceSum", ["past_key_values.0.encoder.key", "all"], ["b"], keepdims=0),
            helper.make_node("Unsqueeze", ["a", "one"], ["a1"]),
            helper.make_node("Unsqueeze", ["b", "one"], ["b1"]),
            helper.make_node("Concat", ["a1", "b1"], ["logits"], axis=1),
        ],
        [
            ("input_ids", INT, ["batch", 1]),
            ("encoder_attention_mask", INT, ["batch", "encoder_length"]),
            ("past_key_values.0.decoder.key", FLOAT, past),
            ("past_key_values.0.encoder.key", FLOAT, cross),
        ],
        [("logits", FLOAT, ["batch", 2]), ("present.0.decoder.key", FLOAT, ["batch", 1, "next", 1])],
    )
    return folder


BATCH = Batch(np.array([[1, 2, 3], [4, 5, 9]]), np.array([[1, 1, 1], [1, 1, 0]]))


def language_model(folder: Path, caches: Any) -> Path:
    """A graph that gives each token as its logits; `caches`: of inputs and outputs."""
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    cache = ["batch", 1, "past", 1]
    write(
        folder / "model.onnx",
        [
            helper.make_node("Add", ["input_ids", "position_ids"], ["s"]),
            helper.make_node("Cast", ["s"], ["f"], to=FLOAT),
            helper.make_node("Constant", [], ["last"], value_ints=[2]),
            helper.make_node("Unsqueeze", ["f", "last"], ["logits"]),
            *(helper.make_node("Identity", [past], [present]) for past, present in caches),
        ],
        [
            *((n, INT, ["batch", "length"]) for n in ("input_ids", "position_ids")),
            ("attention_mask", INT, ["batch", "total"]),
            *((past, FLOAT, cache) for past, _ in caches),
        ],
        [("logits", FLOAT, ["batch", "length", 1]), *((present, FLOAT, cache) for _, present in caches)],
    )
    return folder


def assert_explains_broken_graph(folder: Path, opened: Callable[[Path], Any], runtime: str) -> None:
    """Expect `opened` to say what is wrong with a decoder that is cut off, missing, or another graph."""
    decoder = folder / "decoder_with_past_model.onnx"
    content = decoder.read_bytes()
    decoder.write_bytes(content[: len(content) // 2])
    with raises_code("unopened-graph", InputError) as excinfo:
        opened(folder)
    assert all(part in str(excinfo.value) for part in ("decoder_with_past_model.onnx", runtime))
    decoder.unlink()
    with raises_code("missing-graph", InputError) as excinfo:
        opened(folder)
    assert "decoder_with_past_model.onnx" in str(excinfo.value)
    value = ("x", FLOAT, [1])
    write(decoder, [helper.make_node("Identity", ["x"], ["y"])], [value], [("y", FLOAT, [1])])
    with raises_code("missing-graph-tensors", InputError) as excinfo:
        opened(folder)
    assert "encoder_attention_mask, input_ids, logits" in str(excinfo.value)


def assert_rejects_other_encoder(folder: Path, opened: Callable[[Path], Any]) -> None:
    """Expect `opened` to say that this encoder leaves nothing of what the decoder takes."""
    ids = ("input_ids", INT, ["batch", "encoder_length"])
    mask = ("attention_mask", INT, ["batch", "encoder_length"])
    node = helper.make_node("Mul", ["input_ids", "attention_mask"], ["last_hidden_state"])
    out = ("last_hidden_state", INT, ["batch", "encoder_length"])
    write(folder / "encoder_model.onnx", [node], [ids, mask], [out])
    with raises_code("mismatched-graphs", InputError) as excinfo:
        opened(folder)
    assert "past_key_values.0.encoder.key" in str(excinfo.value)


def assert_reorders_rows(folder: Path, opened: Callable[[Path], Any]) -> None:
    """Expect rows of `token_sum_decoder` to move with their sums; what beams share stays where it is."""
    with opened(folder) as runner:
        state = runner.encode(BATCH)
        runner.decode_step(state, np.array([1, 10]))
        state = runner.reorder_cache(state, np.array([0, 0, 1, 1]))  # two beams of each sentence
        first = runner.decode_step(state, np.array([1, 2, 3, 4]))
        shared = dict(state.backend_state.shared)
        state = runner.reorder_cache(state, np.array([1, 1, 3, 2]))
        assert all(state.backend_state.shared[name] is value for name, value in shared.items())
        second = runner.decode_step(state, np.array([5, 6, 7, 8]))
        state = runner.reorder_cache(state, np.array([3, 0]))  # beams and sentences are dropped
        third = runner.decode_step(state, np.array([0, 0]))
    assert first.tolist() == [[2, 6], [3, 6], [13, 9], [14, 9]]
    assert second.tolist() == [[8, 6], [9, 6], [21, 9], [21, 9]]
    assert third.tolist() == [[21, 9], [8, 6]]
