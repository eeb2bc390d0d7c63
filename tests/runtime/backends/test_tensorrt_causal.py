"""The runner of decoder-only engines, on a stand-in that computes with ONNX Runtime."""

import contextlib
from types import SimpleNamespace

import fake_tensorrt
import numpy as np
import pytest
import tensorrt_graphs
import torch

from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError, RunError
from smelt.export.tensorrt.preflight import load_graph
from smelt.export.tensorrt.profile import Range, causal_ranges, shapes_of
from smelt.runtime.backends import tensorrt_causal, tensorrt_engine
from smelt.runtime.backends.onnx_causal import OnnxCausalRunner
from smelt.runtime.backends.open_runner import open_runner
from smelt.runtime.backends.tensorrt_causal import TensorrtCausalRunner
from smelt.runtime.batch import Batch
from smelt.runtime.generate.loop import generate
from smelt.runtime.generate.settings import Generation

TASK = "language-modeling"
# two rows and four tokens at once, sixteen in all
RANGES = {"batch": Range(1, 1, 2)} | causal_ranges(prompt=4, max_new_tokens=12, limit=64)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """A tiny Llama exported for TensorRT, with a stand-in's plan beside the graph."""
    out = tensorrt_graphs.copy("llama", tmp_path_factory.mktemp("llama") / "onnx")
    path = out / "model.onnx"
    fake_tensorrt.write_plan(path, shapes_of(load_graph(path), RANGES, path.name), out / "model.plan")
    manifest = Manifest(
        key="0" * 64, format="tensorrt", task=TASK, stage="x", settings={}, seed=0, parent=None, versions={}
    )
    return Artifact(out, manifest)


@pytest.fixture
def trt(monkeypatch):
    """TensorRT and CUDA replaced by stand-ins on the CPU."""
    module = fake_tensorrt.Module()
    stream = SimpleNamespace(cuda_stream=fake_tensorrt.STREAM, synchronize=lambda: None)
    monkeypatch.setattr(tensorrt_causal, "import_tensorrt", lambda: module)
    monkeypatch.setattr(tensorrt_causal, "DEVICE", "cpu")
    monkeypatch.setattr(tensorrt_engine, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return module


def prompts():
    """Three prompts of 6, 3 and 1 tokens, padded on the left."""
    mask = np.array([[1] * 6, [0] * 3 + [1] * 3, [0] * 5 + [1]])
    return Batch(np.random.default_rng(0).integers(5, 300, (3, 6)) * mask, mask)


def onnx(artifact):
    return OnnxCausalRunner.over(artifact.path, "tensorrt", 1)


@pytest.mark.parametrize("beams", [1, 2])
def test_continuations_equal_onnx_runtimes_though_rows_and_prompts_are_split(trt, artifact, beams):
    generation = Generation(beams=beams, max_new_tokens=8)
    with onnx(artifact) as runner:
        expected = generate(runner, prompts(), generation)
    with open_runner(artifact) as runner:
        assert isinstance(runner, TensorrtCausalRunner)
        assert generate(runner, prompts(), generation) == expected
    assert len({tuple(row) for row in expected}) == 3
    shapes = [call[2] for call in trt.calls if call[:2] == ("set_input_shape", "input_ids")]
    assert shapes[:4] == [(2, 4), (1, 4), (2, 1), (1, 1)]  # five tokens of a prompt but the last: 4 + 1


def test_logits_of_a_text_longer_than_one_call_equal_onnx_runtimes(trt, artifact):
    ids = np.random.default_rng(1).integers(5, 300, (2, 11))
    batch = Batch(ids, np.ones_like(ids))
    with onnx(artifact) as runner:
        expected = runner.forward(batch)
    with TensorrtCausalRunner(artifact, 1) as runner:
        got = runner.forward(batch)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_text_beyond_the_engine_says_which_setting(trt, artifact):
    with TensorrtCausalRunner(artifact, 1) as runner:
        most = RANGES["past"].max + 1
        assert runner.config["max_position_embeddings"] == most
        state = runner.start(1)
        ids = np.full((1, most + 5), 7)
        with pytest.raises(RunError, match=r"model\.plan: input .*was built for.*max_new_tokens"):
            runner.extend(state, ids, np.ones_like(ids))


def test_missing_engine_and_closed_runner_are_refused(trt, artifact, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"model\.plan: no such engine"):
        TensorrtCausalRunner(Artifact(tmp_path, artifact.manifest))
    with TensorrtCausalRunner(artifact, 1) as runner:
        pass
    with pytest.raises(InputError, match="was closed"):
        runner.start(1)
