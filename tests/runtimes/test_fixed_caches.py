"""Caches of a fixed length that a graph writes in place, on the CPU and on a stand-in for TensorRT."""

import ctypes
import shutil

import numpy as np
import onnxruntime
import pytest
import torch

from smelt.core.errors import MissingDependencyError
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings, TensorrtSettings
from smelt.export.tensorrt.profiles import profile_ranges
from smelt.export.tensorrt.stage import plan_graphs
from smelt.generation.config import GenerationSettings
from smelt.generation.prompt_batches import pad_left
from smelt.generation.search import generate
from smelt.models.checkpoint import load_model
from smelt.runtimes import fixed_caches
from smelt.runtimes.registry import open_folder, open_runner
from tests.runtimes.test_tensorrt_backend import artifact, trt
from tests.support.expected_errors import raises_code
from tests.support.graphs import cuda_graphs, graph_exports
from tests.support.models import tiny
from tests.support.processes import cuda_rig, cuda_steps
from tests.support.shared_folders import make_once
from tests.support.standins import fake_tensorrt

__all__ = ["trt"]
LENGTH, NEW = 24, 8
PROMPTS = [[7, 3, 9, 4, 12, 5], [8, 11], [6]]


def exported(family, target="ort-cuda"):
    """Return the folder of a tiny model and of its graph with caches of LENGTH positions."""

    def make(folder):
        write, task = graph_exports.FAMILIES[family]
        source = write(folder / "model")
        graph_exports.randomize_biases(source)
        settings = OnnxSettings(target=target, cache_length=LENGTH)
        Onnx()(tiny.as_artifact(source, task), settings, graph_exports.make_context(folder / "onnx", task))

    folder = make_once(f"fixed-caches-{family}-{target}", make)
    return folder / "model", folder / "onnx"


def transformers_tokens(folder, prompts, beams):
    """Return the new tokens of transformers' `generate`, for each prompt alone, without padding."""
    model = load_model(folder)[0].eval()
    outputs = []
    for prompt in prompts:
        tokens = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW, num_beams=beams, do_sample=False,
        )  # fmt: skip
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


def test_mask_and_write_indices_of_a_step():
    feeds = {
        "input_ids": np.array([[5, 6], [7, 8]]),
        "attention_mask": np.array([[0, 1, 1, 1], [1, 1, 1, 1]]),
        "position_ids": np.array([[1, 2], [2, 3]]),
    }
    full = fixed_caches.cache_feeds(feeds, 6)
    assert full["attention_mask"].tolist() == [[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert full["write_indices"].tolist() == [2, 2]
    assert full["position_ids"] is feeds["position_ids"]
    assert fixed_caches.cache_feeds(feeds, None) is feeds
    with raises_code("cache-full"):
        fixed_caches.cache_feeds(feeds, 3)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_padded_prompts_generate_the_tokens_of_transformers(family, beams):
    model, folder = exported(family)
    expected = transformers_tokens(model, PROMPTS, beams)
    with open_folder(folder, "onnx", "ort-cuda", 1, "cpu") as runner:
        actual = generate(
            runner, pad_left(PROMPTS, 0), GenerationSettings(max_new_tokens=NEW, num_beams=beams)
        )
    assert actual == expected
    assert len({tuple(row) for row in expected}) > 1


def test_steps_write_into_the_memory_of_the_caches():
    """The same buffers for all steps, one for each key and value; the rest of them remains 0."""
    _, folder = exported("llama")
    with open_folder(folder, "onnx", "ort-cuda", 1, "cpu") as runner:
        state = runner.encode(pad_left([[7, 3, 9, 4]], 0))
        addresses = [value.data_ptr() for value in state.backend_state.caches]
        for token in (5, 6):
            runner.decode_step(state, np.array([token]))
        caches = state.backend_state.caches
        assert [value.data_ptr() for value in caches] == addresses
        for value in caches:
            assert value.shape()[2] == LENGTH
            assert np.abs(value.numpy()[:, :, :5]).min(axis=(1, 3)).all()
            assert not value.numpy()[:, :, 5:].any()


def test_text_beyond_the_caches_is_refused_before_it_runs():
    _, folder = exported("llama")
    with open_folder(folder, "onnx", "ort-cuda", 1, "cpu") as runner:
        assert runner.backend.max_total_tokens == LENGTH
        with raises_code("engine-limit"):
            generate(runner, pad_left(PROMPTS, 0), GenerationSettings(max_new_tokens=LENGTH + 1))


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """The folder of a graph with a stand-in's plan of two rows, exported before CUDA is pretended."""
    folder = tmp_path_factory.mktemp("engines") / "onnx"
    shutil.copytree(exported("llama", "tensorrt")[1], folder)
    ctx = graph_exports.make_context(folder.with_name("out"), "language-modeling")
    settings = TensorrtSettings(max_batch_size=2, max_new_tokens=NEW)
    ranges, limit = profile_ranges(folder, settings, ctx, cache_length=LENGTH)
    for path, shapes in plan_graphs(folder, ranges, limit, ctx.warnings).items():
        fake_tensorrt.write_plan(path, shapes, path.with_suffix(".plan"))
    return folder


@pytest.mark.parametrize("beams", [1, 3])
def test_engines_generate_the_tokens_of_the_graph(engines, trt, beams):
    """Five prompts on engines of two rows; outputs of caches are bound to the memory of their inputs."""
    prompts, generation = [*PROMPTS, [9, 4], [3]], GenerationSettings(max_new_tokens=NEW, num_beams=beams)
    with open_folder(engines, "onnx", "tensorrt", 1, "cpu") as runner:
        expected = generate(runner, pad_left(prompts, 0), generation)
    with open_runner(artifact(engines, "tensorrt", "language-modeling"), 1) as runner:
        assert runner.backend.max_total_tokens == LENGTH
        assert generate(runner, pad_left(prompts, 0), generation) == expected
        state = runner.encode(pad_left([[7, 3, 9, 4]], 0))
        addresses = [tensor.data_ptr() for tensor in state.backend_state.parts[0].caches.values()]
        runner.decode_step(state, np.array([5]))
        after = [tensor.data_ptr() for tensor in state.backend_state.parts[0].caches.values()]
    assert after == addresses
    shapes = {call[2] for call in trt.calls if call[:2] == ("set_input_shape", "attention_mask")}
    assert {shape[1] for shape in shapes} == {LENGTH}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_cuda_provider_runs_steps_without_copies_of_caches(dtype):
    """Caches begin as zeros on the device, and are neither returned nor sent again."""
    cuda_rig.rig_environment()
    folder = cuda_graphs.cuda_graphs("llama", LENGTH)[dtype]
    answer = cuda_rig.run_in_rig({"folder": str(folder), "fixed": LENGTH}, cuda_steps.__name__)
    assert answer["addresses_after"] == answer["addresses"]
    assert answer["places"] == ["cuda"]
    if dtype != "bf16":  # an operator, which computes nothing here, copies those of bf16
        assert answer["zeros"]
    assert answer["step"]["to host"] < answer["caches"]
    assert answer["step"]["to device"] < answer["caches"]


def test_bf16_caches_begin_as_zeros():
    """Values that are not written yet are multiplied by 0, which is NaN for what memory may hold."""
    shape, bfloat16 = (2, 1, LENGTH, 4), 16
    with open_folder(exported("llama")[1], "onnx", "ort-cuda", 1, "cpu") as runner:
        value = runner.backend._empty_cache(shape, bfloat16)
        assert value.data_type() == "tensor(bfloat16)"
        assert not any(ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape))))


def test_older_onnx_runtime_is_refused(monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("opset 24 is under development")

    fixed_caches.require_cache_operators()
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(MissingDependencyError) as caught:
        fixed_caches.require_cache_operators()
    assert caught.value.code == "missing-operators"
