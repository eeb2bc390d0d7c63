"""Engines are compared with their graphs, on a stand-in that computes with ONNX Runtime."""

import contextlib
import shutil

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import ParityError
from smelt.core.messages import message_codes
from smelt.export.settings import TensorrtSettings
from smelt.export.tensorrt import stage as stage_module
from smelt.export.tensorrt.build_engine import BuiltEngine
from smelt.export.tensorrt.stage import TensorrtStage
from smelt.runtimes import tensorrt_backend
from tests.support.expected_errors import raises_code
from tests.support.graphs import tensorrt_graphs
from tests.support.standins import fake_tensorrt

GPU = {"name": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": "132"}
TASKS = {"marian": "translation", "bert": "text-classification", "llama": "language-modeling"}


@pytest.fixture
def trt(monkeypatch, tmp_path):
    """TensorRT and CUDA replaced by stand-ins; `built` are the graphs that engines compute, by name."""
    module = fake_tensorrt.Module()
    module.built = {}

    def build(trt, path, profiles, options, progress):
        plan = tmp_path / "engine.plan"
        fake_tensorrt.write_plan(module.built.get(path.name, path), list(profiles), plan)
        return BuiltEngine(plan.read_bytes(), [], {}, None)

    # a class, as libraries that are imported later annotate with it
    stream = type("Stream", (), {"cuda_stream": fake_tensorrt.STREAM, "synchronize": lambda self: None})
    for owner, name, value in [
        (stage_module, "import_tensorrt", lambda: module), (stage_module, "build_engine", build),
        (stage_module, "current_gpu", lambda: GPU), (tensorrt_backend, "current_gpu", lambda: GPU),
        (tensorrt_backend, "import_tensorrt", lambda: module), (tensorrt_backend, "CUDA_DEVICE", "cpu"),
        (torch.cuda, "is_available", lambda: True), (torch.cuda, "Stream", stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
    ]:  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return module


def build(folder, family, out, **details):
    out.mkdir()
    manifest = Manifest(
        key="0" * 64, format="onnx", task=TASKS[family], stage="onnx", settings={}, seed=0, parent=None,
        versions={}, details={"target": "tensorrt", "dtype": "fp32"} | details,
    )  # fmt: skip
    ctx = tensorrt_graphs.make_context(out, TASKS[family])
    settings = TensorrtSettings(timing_cache=False, tf32=False, max_new_tokens=12)
    TensorrtStage()(Artifact(folder, manifest), settings, ctx)
    return ctx


@pytest.mark.parametrize("family", TASKS)
def test_engines_equal_their_graphs(trt, tmp_path, family):
    folder = tensorrt_graphs.copy_graphs(family, tmp_path / "onnx")
    parity = build(folder, family, tmp_path / "out").details["parity"]
    assert parity["largest"] < 1e-5
    assert parity["agreement"] == 1


def change_weights(path, out):
    """Write a copy of the graph whose largest float constant is 2 % larger."""
    shutil.copytree(path.parent, out)
    model = onnx.load(out / path.name)
    tensor = max(model.graph.initializer, key=lambda each: np.prod(each.dims) * (each.data_type == 1))
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.02), tensor.name))
    onnx.save(model, out / path.name)
    return out / path.name


def test_engine_with_other_outputs_fails_the_step(trt, tmp_path):
    folder = tensorrt_graphs.copy_graphs("bert", tmp_path / "onnx")
    trt.built["model.onnx"] = change_weights(folder / "model.onnx", tmp_path / "changed")
    with raises_code("parity-failed", ParityError):
        build(folder, "bert", tmp_path / "out")


def test_warning_of_the_runtime_is_a_warning_of_the_step(trt, tmp_path):
    trt.answers["warning"] = "Using an engine plan file across different models of devices"
    ctx = build(tensorrt_graphs.copy_graphs("bert", tmp_path / "onnx"), "bert", tmp_path / "out")
    assert [m.message for m in ctx.warnings if trt.answers["warning"] in m.message]
    assert "tensorrt-warning" in message_codes(ctx.warnings)


def test_bf16_engine_is_not_compared_and_reported(trt, tmp_path):
    folder = tensorrt_graphs.copy_graphs("bert", tmp_path / "onnx")
    ctx = build(folder, "bert", tmp_path / "out", dtype="bf16")
    assert "parity" not in ctx.details
    assert "engine-not-compared" in message_codes(ctx.warnings)


def test_without_gpu_nothing_is_compared(trt, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ctx = build(tensorrt_graphs.copy_graphs("bert", tmp_path / "onnx"), "bert", tmp_path / "out")
    assert "parity" not in ctx.details
    assert not any(call[0] == "deserialize_cuda_engine" for call in trt.calls)
