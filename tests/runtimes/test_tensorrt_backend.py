"""TensorRT on a stand-in that computes with ONNX Runtime, and on a GPU where there is one."""

import contextlib
import warnings
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import EngineWarning, InputError, RunError
from smelt.export.settings import TensorrtSettings
from smelt.export.tensorrt.build_engine import SizeRange, causal_ranges, profile_shapes
from smelt.export.tensorrt.preflight import load_graph
from smelt.export.tensorrt.stage import TensorrtStage
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings
from smelt.generation.search import generate
from smelt.models.tokenizer import encode_texts
from smelt.runtimes import tensorrt_backend
from smelt.runtimes import tensorrt_backend as tensorrt_engine
from smelt.runtimes.predict_texts import class_logits, pad_batch
from smelt.runtimes.registry import open_folder, open_runner
from smelt.runtimes.tensorrt_engine import find_tensorrt
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs, tensorrt_graphs
from tests.support.models import tiny
from tests.support.standins import fake_tensorrt

# two rows and four tokens at once, sixteen in all
CAUSAL = {"batch": SizeRange(1, 1, 2)} | causal_ranges(prompt=4, max_new_tokens=12, limit=64)
RANGES = {"batch": SizeRange(1, 1, 2), "input": SizeRange(1, 6, 16), "past": SizeRange(0, 4, 11)}


def artifact(folder, kind, task):
    details = {"target": "tensorrt"}
    manifest = Manifest(
        key="0" * 64, format=kind, task=task, stage="x", settings={}, seed=0, parent=None, versions={},
        details=details,
    )  # fmt: skip
    return Artifact(folder, manifest)


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A tiny Marian exported for TensorRT in fp16, with a stand-in's plan next to each graph."""
    folder = tensorrt_graphs.copy_graphs("marian", tmp_path_factory.mktemp("marian") / "fp16", half=True)
    for path in folder.glob("*.onnx"):
        shapes = profile_shapes(load_graph(path), RANGES, path.name)
        fake_tensorrt.write_plan(path, shapes, path.with_suffix(".plan"))
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A classifier of one table: the logits of a text are the sum of its tokens' rows."""
    folder = tiny.write_bert(tmp_path_factory.mktemp("bert"))
    table = np.random.default_rng(0).standard_normal((100, 2)).astype(np.float32)
    names = ("input_ids", "attention_mask", "token_type_ids")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Gather", ["table", "token_type_ids"], ["types"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["tokens"]),
        helper.make_node("Add", ["rows", "types"], ["sums"]),
        helper.make_node("Mul", ["sums", "tokens"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "one"], ["logits"], keepdims=0),
    ]
    constants = {"table": table, "last": np.array([-1]), "one": np.array([1])}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "length"]) for n in names],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    fake_tensorrt.write_plan(path, profile_shapes(load_graph(path), RANGES, path.name), folder / "model.plan")
    return folder


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A tiny Llama exported for TensorRT, with a stand-in's plan next to the graph."""
    folder = tensorrt_graphs.copy_graphs("llama", tmp_path_factory.mktemp("llama") / "onnx")
    path = folder / "model.onnx"
    fake_tensorrt.write_plan(path, profile_shapes(load_graph(path), CAUSAL, path.name), folder / "model.plan")
    return folder


@pytest.fixture
def trt(monkeypatch):
    """TensorRT and CUDA replaced by stand-ins on the CPU."""
    module = fake_tensorrt.Module()
    stream = SimpleNamespace(cuda_stream=fake_tensorrt.STREAM, synchronize=lambda: None)
    monkeypatch.setattr(tensorrt_backend, "import_tensorrt", lambda: module)
    monkeypatch.setattr(tensorrt_backend, "CUDA_DEVICE", "cpu")
    monkeypatch.setattr(tensorrt_engine, "CUDA_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return module


def batch_of(runner, rows):
    from smelt.models.checkpoint import load_tokenizer

    tokenizer = load_tokenizer(runner.folder)
    encoded = encode_texts(tiny.SENTENCES[:rows], tokenizer, 16)
    return pad_batch(encoded, range(rows), tokenizer.pad_token_id)


@pytest.mark.parametrize("beams", [1, 3])
def test_translations_equal_onnx_runtime_with_split_batches(trt, translator, beams):
    """Five sentences on an engine that takes two rows: three parts, and with beams eight."""
    generation = GenerationSettings(num_beams=beams, max_new_tokens=10)
    with open_folder(translator, "onnx", "tensorrt", 1) as runner:
        expected = generate(runner, batch_of(runner, 5), generation)
    with open_runner(artifact(translator, "tensorrt", "translation"), 1) as runner:
        assert generate(runner, batch_of(runner, 5), generation) == expected
    assert len({tuple(row) for row in expected}) > 1
    executed = [call for call in trt.calls if call[0] == "execute_async_v3"]
    assert set(executed) == {("execute_async_v3", fake_tensorrt.STREAM)}
    rows = [call[2][0] for call in trt.calls if call[:2] == ("set_input_shape", "input_ids")]
    assert rows[:3] == [2, 2, 1]
    assert max(rows) == 2


def decoder_runs(trt):
    """The shapes of the caches that the decoder's runs read, by their first one."""
    return [call[2] for call in trt.calls if call[:2] == ("set_input_shape", "past_key_values.0.decoder.key")]


def test_beams_of_a_full_batch_are_rows_of_one_run_per_token(trt, tmp_path):
    folder = tensorrt_graphs.copy_graphs("marian", tmp_path / "fp16", half=True)
    ranges = RANGES | {"batch": SizeRange(1, 1, 4), "rows": SizeRange(1, 4, 12)}
    for path in folder.glob("*.onnx"):
        shapes = profile_shapes(load_graph(path), ranges, path.name)
        fake_tensorrt.write_plan(path, shapes, path.with_suffix(".plan"))
    generation = GenerationSettings(num_beams=3, max_new_tokens=10)
    with open_folder(folder, "onnx", "tensorrt", 1) as runner:
        expected = [generate(runner, batch_of(runner, rows), generation) for rows in (4, 5)]
    with open_runner(artifact(folder, "tensorrt", "translation"), 1) as runner:
        assert generate(runner, batch_of(runner, 4), generation) == expected[0]
        assert all(shape[0] in (4, 12) for shape in decoder_runs(trt))
        lengths = [shape[2] for shape in decoder_runs(trt)]
        assert lengths == list(range(len(lengths)))  # one run for a token
        trt.calls.clear()
        # the encoder takes four texts at once, the decoder twelve rows
        assert generate(runner, batch_of(runner, 5), generation) == expected[1]
        assert [shape[0] for shape in decoder_runs(trt)][:5] == [5, 12, 3, 12, 3]


def test_inputs_that_all_steps_share_are_bound_once(trt, translator):
    with open_runner(artifact(translator, "tensorrt", "translation"), 1) as runner:
        state = runner.encode(batch_of(runner, 2))
        for token in (0, 5, 6):
            runner.decode_step(state, np.full(2, token))
    names = [call[1] for call in trt.calls if call[0] == "set_tensor_address"]
    assert names.count("past_key_values.0.encoder.key") == 1
    assert names.count("past_key_values.0.decoder.key") == 3
    assert names.count("present.0.decoder.key") == 3


def test_caches_of_steps_take_turns_in_two_buffers(trt, translator):
    """A step or a reordering reads one and writes the other; both have room for more tokens."""
    with open_runner(artifact(translator, "tensorrt", "translation"), 1) as runner:
        state = runner.encode(batch_of(runner, 2))
        memory, first_keys = [], []
        for token in (0, 5, 6, 7):
            runner.decode_step(state, np.full(2, token))
            [part] = state.backend_state.parts
            memory.append(part.caches["past_key_values.0.decoder.key"].data_ptr())
            first_keys.append(part.caches["past_key_values.0.decoder.key"][:, :, 0].clone())
        runner.reorder_cache(state, np.array([1, 1]))
        [part] = state.backend_state.parts
        keys = part.caches["past_key_values.0.decoder.key"]
    assert memory[0] != memory[1]
    assert memory == memory[:2] * 2
    assert keys.data_ptr() == memory[0]
    assert all(torch.equal(key, first_keys[0]) for key in first_keys)
    assert torch.equal(keys[:, :, 0], first_keys[0][[1, 1]])


def test_memory_that_is_too_small_is_replaced_and_has_room_for_more_tokens(trt):
    buffers = tensorrt_backend.CacheBuffers()
    first, second = (buffers.next("past", (2, 3, tokens, 4), torch.float16) for tokens in (1, 2))
    third = buffers.next("past", (2, 3, 17, 4), torch.float16)  # 1 token, and 16 more
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()
    fourth = buffers.next("past", (2, 3, 160, 4), torch.float16)
    assert (tuple(fourth.shape), fourth.dtype) == ((2, 3, 160, 4), torch.float16)
    buffers.next("past", (2, 3, 161, 4), torch.float16)
    assert buffers.next("past", (2, 3, 180, 4), torch.float16).data_ptr() == fourth.data_ptr()


def test_more_rows_than_the_engine_takes_are_warned_about_once(trt, translator):
    generation = GenerationSettings(num_beams=3, max_new_tokens=4)
    opened = open_runner(artifact(translator, "tensorrt", "translation"), 1)
    with opened as runner, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            generate(runner, batch_of(runner, 2), generation)
    assert [item.message.code for item in caught if item.category is EngineWarning] == ["rows-split"]


def test_each_engine_selects_its_profile_once_and_sets_shapes_before_running(trt, translator):
    with open_runner(artifact(translator, "tensorrt", "translation"), 1) as runner:
        state = runner.encode(batch_of(runner, 2))
        runner.decode_step(state, np.zeros(2, dtype=np.int64))
    names = [call[0] for call in trt.calls]
    assert names.count("set_optimization_profile_async") == 2
    assert names.count("execute_async_v3") == 2
    runs = " ".join(names).split("execute_async_v3")[:2]
    for run in runs:
        calls = run.split()
        assert calls.index("infer_shapes") > max(i for i, c in enumerate(calls) if c == "set_input_shape")
        assert calls[-1] == "set_tensor_address"


def test_output_longer_than_the_engine_names_the_setting(trt, translator):
    with open_runner(artifact(translator, "tensorrt", "translation"), 1) as runner:
        state = runner.encode(batch_of(runner, 1))
        for _ in range(RANGES["past"].max + 1):
            runner.decode_step(state, np.array([5]))
        with raises_code("engine-limit", RunError) as caught:
            runner.decode_step(state, np.array([5]))
        assert all(part in str(caught.value) for part in ("decoder_with_past_model.plan", "max_new_tokens"))


def test_class_logits_equal_onnx_runtime(trt, classifier):
    with open_folder(classifier, "onnx", "tensorrt", 1) as runner:
        expected = class_logits(runner, tensorrt_graphs.ROWS, 5)
    with open_runner(artifact(classifier, "tensorrt", "text-classification"), 1) as runner:
        actual = class_logits(runner, tensorrt_graphs.ROWS, 5)
        np.testing.assert_allclose(actual, expected, atol=1e-6)
        assert runner.text.max_input_length == 16  # what the engine takes, not the model's 32
        with raises_code("does-not-generate", InputError):
            runner.encode(batch_of(runner, 1))
    with raises_code("closed-model", InputError):
        runner.forward(batch_of(runner, 1))


def test_folder_without_plans_and_machine_without_a_gpu_are_refused(trt, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    with raises_code("missing-engine", InputError) as caught:
        open_runner(artifact(tmp_path, "tensorrt", "translation"))
    assert "model.plan" in str(caught.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises_code("no-gpu", InputError):
        open_runner(artifact(tmp_path, "tensorrt", "translation"))


def prompts():
    """Three prompts of 6, 3 and 1 tokens, padded on the left."""
    mask = np.array([[1] * 6, [0] * 3 + [1] * 3, [0] * 5 + [1]])
    return Batch(np.random.default_rng(0).integers(5, 300, (3, 6)) * mask, mask)


@pytest.mark.parametrize("beams", [1, 2])
def test_continuations_equal_onnx_runtime_with_split_rows_and_prompts(trt, writer, beams):
    generation = GenerationSettings(num_beams=beams, max_new_tokens=8)
    with open_folder(writer, "onnx", "tensorrt", 1) as runner:
        expected = generate(runner, prompts(), generation)
    with open_runner(artifact(writer, "tensorrt", "language-modeling")) as runner:
        assert runner.name == "tensorrt"
        assert generate(runner, prompts(), generation) == expected
    assert len({tuple(row) for row in expected}) == 3
    shapes = [call[2] for call in trt.calls if call[:2] == ("set_input_shape", "input_ids")]
    assert shapes[:4] == [(2, 4), (1, 4), (2, 1), (1, 1)]  # five tokens of a prompt but the last: 4 + 1


def test_logits_of_a_text_longer_than_one_call_equal_onnx_runtime(trt, writer):
    ids = np.random.default_rng(1).integers(5, 300, (2, 11))
    batch = Batch(ids, np.ones_like(ids))
    with open_folder(writer, "onnx", "tensorrt", 1) as runner:
        expected = runner.forward(batch)
    with open_runner(artifact(writer, "tensorrt", "language-modeling"), 1) as runner:
        actual = runner.forward(batch)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_text_beyond_the_engine_names_the_setting(trt, writer):
    with open_runner(artifact(writer, "tensorrt", "language-modeling"), 1) as runner:
        most = CAUSAL["past"].max + 1
        assert runner.config["max_position_embeddings"] == most
        state = runner.start(1)
        ids = np.full((1, most + 5), 7)
        with raises_code("engine-limit", RunError) as caught:
            runner.extend(state, ids, np.ones_like(ids))
        assert all(part in str(caught.value) for part in ("model.plan", "max_new_tokens"))


def test_closed_language_model_and_engine_without_cache_are_refused(trt, writer, classifier, tmp_path):
    with open_runner(artifact(writer, "tensorrt", "language-modeling"), 1) as runner:
        pass
    with raises_code("closed-model", InputError):
        runner.start(1)
    (tmp_path / "config.json").write_bytes((writer / "config.json").read_bytes())
    (tmp_path / "model.plan").write_bytes((classifier / "model.plan").read_bytes())
    with raises_code("no-cache", InputError) as caught:
        open_runner(artifact(tmp_path, "tensorrt", "language-modeling"))
    assert "model.plan" in str(caught.value)


gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or find_tensorrt() is None,
    reason="needs an NVIDIA GPU that torch sees, and TensorRT",
)


@pytest.mark.gpu
@gpu
def test_real_engines_translate_as_onnx_runtime(translator, tmp_path):
    settings = TensorrtSettings(max_batch_size=2, max_new_tokens=12, timing_cache=False, tf32=False)
    TensorrtStage()(
        artifact(translator, "onnx", "translation"),
        settings,
        tensorrt_graphs.make_context(tmp_path, "translation"),
    )
    generation = GenerationSettings(max_new_tokens=10)
    with open_folder(translator, "onnx", "tensorrt", 1) as runner:
        expected = generate(runner, batch_of(runner, 5), generation)
    with open_runner(artifact(tmp_path, "tensorrt", "translation")) as runner:
        actual = generate(runner, batch_of(runner, 5), generation)
    same = sum(a == b for a, b in zip(actual, expected, strict=True))
    assert same >= 3  # in fp16 two tokens of a random model may be equally likely


@pytest.mark.gpu
@gpu
def test_real_engine_logits_equal_onnx_runtime(classifier, tmp_path):
    settings = TensorrtSettings(max_batch_size=2, timing_cache=False, tf32=False)
    source = artifact(classifier, "onnx", "text-classification")
    TensorrtStage()(source, settings, tensorrt_graphs.make_context(tmp_path, "text-classification"))
    with open_folder(classifier, "onnx", "tensorrt", 1) as runner:
        expected = class_logits(runner, tensorrt_graphs.ROWS, 5)
    with open_runner(artifact(tmp_path, "tensorrt", "text-classification")) as runner:
        np.testing.assert_allclose(class_logits(runner, tensorrt_graphs.ROWS, 5), expected, atol=1e-3)


def test_arrays_are_sliced_along_their_row_axis(trt, tmp_path):
    """Five rows on an engine that takes two, the state's on axis 1, as the output's that is like it."""
    shapes = (["batch", "time", 4], ["layers", "batch", 8], ["layers", "batch", 8])
    source = imported_graphs.make_artifact(tmp_path / "a", imported_graphs.gru_model(*shapes))
    rows = imported_graphs.gru_rows(tmp_path / "r.npz", 5)
    path = source.path / "model.onnx"
    most = {"x": (2, 6, 4), "state": (1, 2, 8)}
    least = {"x": (1, 6, 4), "state": (1, 1, 8)}
    fake_tensorrt.write_plan(
        path, {n: (least[n], least[n], most[n]) for n in most}, source.path / "model.plan"
    )
    expected = imported_graphs.run_directly(path, rows)
    with open_runner(artifact(source.path, "tensorrt", "custom"), 1) as runner:
        actual = runner.run(rows)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, atol=1e-5)
    inputs = [call[2] for call in trt.calls if call[:2] == ("set_input_shape", "state")]
    assert [shape[1] for shape in inputs] == [2, 2, 1]
