"""OpenVINO compared with torch and ONNX Runtime, on the same graphs."""

import threading
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from smelt.core.errors import InputError, MissingDependencyError
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings
from smelt.generation.search import generate
from smelt.models.checkpoint import load_model
from smelt.runtimes import openvino_backend
from smelt.runtimes.openvino_backend import compile_graph, cpu_plugin_options, import_openvino
from smelt.runtimes.registry import open_folder
from tests.support.expected_errors import raises_code
from tests.support.graphs import counting_graphs as graphs
from tests.support.graphs import graph_exports
from tests.support.graphs.counting_graphs import (
    BATCH,
    FLOAT,
    assert_explains_broken_graph,
    assert_rejects_other_encoder,
    assert_reorders_rows,
    language_model,
    write,
)
from tests.support.models import generation_models
from tests.support.pairs import matrix


def opened(folder, dtype="fp32"):
    return open_folder(folder, "onnx", "openvino", 1, dtype=dtype)


@pytest.fixture
def counting(tmp_path):
    return graphs.token_sum_decoder(tmp_path)


@pytest.mark.parametrize(("family", "beams"), matrix.matrix_cells(["marian", "t5", "gpt2", "llama"], [1, 3]))
def test_tokens_equal_those_of_transformers_and_of_onnx_runtime(family, beams):
    made = graph_exports.exported_graphs(family, "fp32", "openvino")
    batch = made.reference.batch
    wishes = {"num_beams": beams, "max_new_tokens": 8}
    model, _ = load_model(made.folder.parent / "model")  # the one that was exported was changed for that
    expected = generation_models.transformers_tokens(model, batch, do_sample=False, **wishes)
    settings = GenerationSettings(num_beams=beams, max_new_tokens=8)
    with opened(made.folder) as runner, open_folder(made.folder, "onnx", "tensorrt", 1) as other:
        assert (runner.name, runner.device) == ("openvino", "cpu")
        assert generate(runner, batch, settings) == generate(other, batch, settings) == expected
    if family != "t5":  # with beams the tiny one says the same of all texts
        assert len({tuple(row) for row in expected}) > 1


@pytest.mark.parametrize("family", ["roberta", "embedder"])
def test_classes_and_vectors_equal_those_of_onnx_runtime(family):
    made = graph_exports.exported_graphs(family, "fp32", "openvino")
    batch = made.reference.batch
    with opened(made.folder) as runner, open_folder(made.folder, "onnx", "tensorrt", 1) as other:
        found = runner.forward(batch)
        np.testing.assert_allclose(found, other.forward(batch), atol=1e-5)
        np.testing.assert_allclose(found, made.reference.logits, atol=1e-5)
    assert np.ptp(found, axis=0).max() > 0.01


def test_logits_of_a_whole_text_equal_those_of_onnx_runtime():
    made = graph_exports.exported_graphs("gpt2", "fp32", "openvino")
    batch = made.reference.batch
    with opened(made.folder) as runner, open_folder(made.folder, "onnx", "tensorrt", 1) as other:
        found = runner.forward(batch)
        np.testing.assert_allclose(found, other.forward(batch), atol=1e-3)
    assert found.shape[:2] == batch.input_ids.shape


@pytest.mark.parametrize(("family", "dtype"), matrix.matrix_cells(["marian", "gpt2"], ["fp32", "bf16"]))
def test_logits_stay_right_while_a_cache_grows_from_nothing(family, dtype):
    """Attention of OpenVINO's own making is wrong from 16 keys on if its first call had one."""
    made = graph_exports.exported_graphs(family, "fp32", "openvino")
    whole = made.reference.batch
    batch = Batch(whole.input_ids[:, -1:], whole.attention_mask[:, -1:])  # a language model then begins empty
    batch = batch if family == "gpt2" else whole
    with opened(made.folder, dtype) as runner, open_folder(made.folder, "onnx", "tensorrt", 1) as other:
        mine, theirs = runner.encode(batch), other.encode(batch)
        tokens = np.full(len(batch.input_ids), 5)
        for _ in range(20):
            found, expected = runner.decode_step(mine, tokens), other.decode_step(theirs, tokens)
            off = np.abs(found - expected).mean() / expected.std()
            assert off < (0.1 if dtype == "bf16" else 5e-5)
            tokens = expected.argmax(-1)


def test_precision_is_what_was_said_and_never_openvinos_default():
    made = graph_exports.exported_graphs("bert", "fp32", "openvino")
    batch, found = made.reference.batch, {}
    for dtype in (None, "fp32", "bf16"):
        with opened(made.folder, dtype) as runner:
            model = runner.backend._models["model"]
            hint = model.get_property("INFERENCE_PRECISION_HINT").get_type_name()
            found[dtype] = runner.forward(batch)
            assert hint == ("bf16" if dtype == "bf16" and openvino_backend.has_bf16() else "f32")
    assert (found[None] == found["fp32"]).all()
    if openvino_backend.has_bf16():
        off = np.abs(found["bf16"] - found["fp32"]).mean() / found["fp32"].std()
        assert 1e-4 < off < 0.1


def test_threads_and_pinning_are_as_asked_and_no_cache_is_written(counting, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    before = sorted(counting.iterdir())
    for threads in (1, 2):
        model = compile_graph(counting / "encoder_model.onnx", "fp32", threads)
        assert model.get_property("INFERENCE_NUM_THREADS") == threads
        assert model.get_property("ENABLE_CPU_PINNING") is False
        assert model.get_property("NUM_STREAMS") == 1
    assert "INFERENCE_NUM_THREADS" not in cpu_plugin_options("fp32", None)
    assert sorted(counting.iterdir()) == before
    assert not list(Path.cwd().iterdir())


def test_caches_pass_from_step_to_step_and_two_states_do_not_mix(counting):
    with opened(counting) as runner:
        first, second = runner.encode(BATCH), runner.encode(BATCH)
        sums, other = [], []
        for a, b in (([1, 10], [7, 70]), ([2, 20], [1, 1]), ([3, 30], [0, 5])):
            sums.append(runner.decode_step(first, np.array(a)))
            other.append(runner.decode_step(second, np.array(b)))
    assert [s.tolist() for s in sums] == [[[1, 6], [10, 9]], [[3, 6], [30, 9]], [[6, 6], [60, 9]]]
    assert [s.tolist() for s in other] == [[[7, 6], [70, 9]], [[8, 6], [71, 9]], [[8, 6], [76, 9]]]
    assert sums[0].dtype == np.float32
    assert sums[0].flags.writeable


def test_reorder_moves_rows_and_leaves_alone_what_beams_share(counting):
    with opened(counting) as runner:
        state = runner.reorder_cache(runner.encode(BATCH), np.array([0, 1, 1]))  # before anything was fed
        assert runner.decode_step(state, np.array([1, 2, 3])).tolist() == [[1, 6], [2, 9], [3, 9]]
    assert_reorders_rows(counting, opened)


def test_several_threads_get_what_each_would_get_alone():
    made = graph_exports.exported_graphs("marian", "fp32", "openvino")
    settings = GenerationSettings(max_new_tokens=8)
    ids, mask = made.reference.batch.input_ids, made.reference.batch.attention_mask
    batches = [Batch(ids[at : at + 1], mask[at : at + 1]) for at in range(4)]
    with opened(made.folder) as runner:
        alone = [generate(runner, batch, settings) for batch in batches]
        found: dict[tuple[int, int], object] = {}

        def work(at):
            for again in range(3):
                found[at, again] = generate(runner, batches[at], settings)

        threads = [threading.Thread(target=work, args=(at,)) for at in range(len(batches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {(at, again): alone[at] for at in range(len(batches)) for again in range(3)}


def test_a_closed_model_says_so(counting):
    with opened(counting) as runner:
        state = runner.encode(BATCH)
    for ask in (
        lambda: runner.encode(BATCH),
        lambda: runner.encoder_outputs(BATCH),
        lambda: runner.decode_step(state, np.array([1, 2])),
    ):
        with raises_code("closed-model", InputError):
            ask()


def test_corrupt_missing_and_foreign_graphs_are_explained(counting):
    assert_explains_broken_graph(counting, opened, "OpenVINO")


def test_an_encoder_of_another_model_is_refused(counting):
    assert_rejects_other_encoder(counting, opened)


def test_language_model_that_carries_nothing_on_is_refused(tmp_path):
    with raises_code("missing-cache", InputError) as caught:
        opened(language_model(tmp_path, []))
    assert "model.onnx" in str(caught.value)


def test_an_operator_that_openvino_does_not_know_is_named(tmp_path):
    path = tmp_path / "model.onnx"
    node = helper.make_node("SparseAttention", ["x"], ["y"], domain="com.microsoft")
    write(path, [node], [("x", FLOAT, [1])], [("y", FLOAT, [1])])
    with raises_code("unopened-graph", InputError) as caught:
        compile_graph(path, "fp32", 1)
    assert all(part in str(caught.value) for part in ("model.onnx", "SparseAttention"))


def test_a_missing_package_and_an_old_one_say_how_to_get_it(monkeypatch):
    monkeypatch.setattr(import_openvino(), "__version__", "2025.4.0-1-abc")
    with raises_code("outdated-package", InputError) as caught:
        import_openvino()
    assert "2025.4.0" in str(caught.value)
    monkeypatch.setattr(openvino_backend, "has_openvino", lambda: False)
    with raises_code("not-installed", MissingDependencyError):
        import_openvino()
