from types import SimpleNamespace

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from smelt.core.errors import InputError
from smelt.runtime.backends.onnx_runner import OnnxRunner, lacks_vnni
from smelt.runtime.batch import Batch


def artifact(folder):
    return SimpleNamespace(path=folder, manifest=SimpleNamespace(facts={"target": "ort-cpu"}))


def write(path, nodes, inputs, outputs):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, t, s) for n, t, s in inputs],
        [helper.make_tensor_value_info(n, t, s) for n, t, s in outputs],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


INT, FLOAT = TensorProto.INT64, TensorProto.FLOAT


@pytest.fixture
def counting(tmp_path):
    """A decoder that appends its token to the cache and answers with the sum of all it was fed.

    The encoder leaves the source's ids as keys; logits[:, 0] is the sum of the cache, logits[:, 1]
    the sum of the source's keys.
    """
    ids = ("input_ids", INT, ["batch", "encoder_length"])
    mask = ("attention_mask", INT, ["batch", "encoder_length"])
    cross = ["batch", 1, "encoder_length", 1]
    axes = helper.make_node("Constant", [], ["axes"], value_ints=[1, 3])
    write(
        tmp_path / "encoder_model.onnx",
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
        tmp_path / "decoder_with_past_model.onnx",
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
    return tmp_path


BATCH = Batch(np.array([[1, 2, 3], [4, 5, 9]]), np.array([[1, 1, 1], [1, 1, 0]]))


def test_caches_pass_from_step_to_step_and_two_states_do_not_mix(counting):
    with OnnxRunner(artifact(counting), 1) as runner:
        first, second = runner.encode(BATCH), runner.encode(BATCH)
        sums = [runner.decode_step(first, np.array(t)) for t in ([1, 10], [2, 20], [3, 30])]
        other = runner.decode_step(second, np.array([7, 70]))
    assert [s.tolist() for s in sums] == [[[1, 6], [10, 9]], [[3, 6], [30, 9]], [[6, 6], [60, 9]]]
    assert other.tolist() == [[7, 6], [70, 9]]
    assert sums[0].dtype == np.float32
    assert sums[0].flags.writeable


def test_reorder_moves_rows_and_leaves_alone_what_beams_share(counting):
    with OnnxRunner(artifact(counting), 1) as runner:
        state = runner.encode(BATCH)
        runner.decode_step(state, np.array([1, 10]))
        state = runner.reorder(state, np.array([0, 0, 1, 1]))  # two beams of each sentence
        first = runner.decode_step(state, np.array([1, 2, 3, 4]))
        shared = dict(state.shared)
        state = runner.reorder(state, np.array([1, 1, 3, 2]))
        assert all(state.shared[name] is value for name, value in shared.items())
        second = runner.decode_step(state, np.array([5, 6, 7, 8]))
        state = runner.reorder(state, np.array([3, 0]))  # beams and sentences are dropped
        third = runner.decode_step(state, np.array([0, 0]))
    assert first.tolist() == [[2, 6], [3, 6], [13, 9], [14, 9]]
    assert second.tolist() == [[8, 6], [9, 6], [21, 9], [21, 9]]
    assert third.tolist() == [[21, 9], [8, 6]]


def test_reorder_that_changes_nothing_copies_nothing(counting):
    with OnnxRunner(artifact(counting), 1) as runner:
        state = runner.encode(BATCH)
        runner.decode_step(state, np.array([1, 10]))
        before = list(state.caches)
        state = runner.reorder(state, np.arange(2))
        assert before
        assert all(after is value for after, value in zip(state.caches, before, strict=True))


def test_a_text_generator_does_not_classify(counting):
    with OnnxRunner(artifact(counting), 1) as runner, pytest.raises(InputError, match="they do not classify"):
        runner.forward(BATCH)


def test_corrupt_missing_and_foreign_graphs_are_explained(counting):
    decoder = counting / "decoder_with_past_model.onnx"
    good = decoder.read_bytes()
    decoder.write_bytes(good[: len(good) // 2])
    with pytest.raises(InputError, match=r"decoder_with_past_model\.onnx: ONNX Runtime cannot load"):
        OnnxRunner(artifact(counting), 1)
    decoder.unlink()
    with pytest.raises(InputError, match="no such graph"):
        OnnxRunner(artifact(counting), 1)
    value = ("x", FLOAT, [1])
    write(decoder, [helper.make_node("Identity", ["x"], ["y"])], [value], [("y", FLOAT, [1])])
    with pytest.raises(InputError, match="has no encoder_attention_mask, input_ids, logits; it has the"):
        OnnxRunner(artifact(counting), 1)


def test_an_encoder_of_another_model_is_refused(counting):
    ids = ("input_ids", INT, ["batch", "encoder_length"])
    mask = ("attention_mask", INT, ["batch", "encoder_length"])
    node = helper.make_node("Mul", ["input_ids", "attention_mask"], ["last_hidden_state"])
    out = ("last_hidden_state", INT, ["batch", "encoder_length"])
    write(counting / "encoder_model.onnx", [node], [ids, mask], [out])
    with pytest.raises(InputError, match=r"do not fit each other: past_key_values\.0\.encoder\.key"):
        OnnxRunner(artifact(counting), 1)


@pytest.mark.parametrize(
    ("flags", "lacking"),
    [
        ("fpu sse4_2 avx2", True),
        ("avx2 avx512f avx512_vnni", False),
        ("avx2 avx_vnni", False),
        ("asimd", False),
    ],
)
def test_exact_int8_kernels_are_asked_for_only_without_vnni(tmp_path, flags, lacking):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t: {flags}\n")
    assert lacks_vnni(tmp_path / "cpuinfo") is lacking
    assert lacks_vnni(tmp_path / "absent") is False
