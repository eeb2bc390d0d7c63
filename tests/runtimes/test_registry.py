"""Which runtime is for which artifact, and that what the registry says of it is so."""

import pytest

from smelt.runtimes import registry
from smelt.runtimes.registry import RUNTIMES, RuntimeSpec, find_runtime, runtime_target


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda runtime: runtime.target or runtime.format)
def test_every_runtime_loads_and_implements_the_backend(runtime):
    backend = runtime.load_backend()
    assert isinstance(backend.name, str)
    for method in ("call", "start", "step", "reorder_cache", "close"):
        assert callable(getattr(backend, method)), method


def test_runtime_is_selected_by_format_and_target(monkeypatch):
    extra = RuntimeSpec("onnx", "x:y", (), "cpu", target="elsewhere")
    monkeypatch.setattr(registry, "RUNTIMES", (extra, *RUNTIMES))
    names = [runtime.backend_class for runtime in RUNTIMES]
    for target in (None, "ort-cpu", "ort-cuda", "tensorrt"):
        assert find_runtime("onnx", target).backend_class == names[1]
    assert find_runtime("torch", None).backend_class == names[0]
    assert find_runtime("onnx", "openvino").backend_class == names[2]
    assert find_runtime("onnx", "ort-tensorrt").backend_class == names[3]
    assert find_runtime("tensorrt", "tensorrt").backend_class == names[4]
    assert find_runtime("onnx", "elsewhere") is extra


@pytest.mark.parametrize(("details", "target"), [
    ({"foreign": True, "target": "ort-cpu", "dtype": "fp32"}, "ort-cuda"),
    ({"foreign": True, "target": "ort-cpu", "dtype": "fp16"}, "ort-cuda"),
    ({"foreign": True, "target": "ort-cpu", "scheme": "int8-dynamic"}, "ort-cpu"),
    ({"foreign": True, "target": "ort-cpu", "codes": 12}, "ort-cpu"),
    ({"foreign": True, "target": "tensorrt"}, "tensorrt"),
    ({"target": "ort-cpu", "dtype": "fp32"}, "ort-cpu"),
])  # fmt: skip
def test_float_graphs_of_third_parties_run_on_the_gpu_where_there_is_one(monkeypatch, details, target):
    """An engine that is built from such a graph is compared with it on the same device."""
    monkeypatch.setattr(registry, "onnx_device", lambda wanted, target: "cpu" if wanted == "cpu" else "cuda")
    assert runtime_target(details, "auto") == target
    assert runtime_target(details, "cpu") == details["target"]


def test_engine_serves_one_call_at_a_time_on_the_gpu():
    engine, others = find_runtime("tensorrt", None), [find_runtime(f, None) for f in ("torch", "onnx")]
    assert (engine.max_concurrent_calls, engine.device) == (1, "cuda")
    assert [runtime.max_concurrent_calls for runtime in others] == [None, None]
    assert [runtime.device("cpu", "ort-cuda") for runtime in others] == ["cpu", "cpu"]
