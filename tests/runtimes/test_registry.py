"""Which runtime is for which artifact, and that what the registry says of it is so."""

import pytest

from smelt.runtimes import registry
from smelt.runtimes.registry import RUNTIMES, RuntimeSpec, find_runtime


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


def test_engine_serves_one_call_at_a_time_on_the_gpu():
    engine, others = find_runtime("tensorrt", None), [find_runtime(f, None) for f in ("torch", "onnx")]
    assert (engine.max_concurrent_calls, engine.device) == (1, "cuda")
    assert [runtime.max_concurrent_calls for runtime in others] == [None, None]
    assert [runtime.device("cpu", "ort-cuda") for runtime in others] == ["cpu", "cpu"]
