"""Opening graphs with the provider of TensorRT: what ONNX Runtime is asked, and what is said of failures."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from smelt.core.errors import InputError, MissingDependencyError
from smelt.runtimes import device, ort_tensorrt_backend
from smelt.runtimes.ort_tensorrt_backend import ProviderOptions, engine_key, open_provider_session
from smelt.runtimes.ort_tensorrt_provider import PROVIDER
from smelt.runtimes.tensorrt_engine import graph_hash
from tests.support.expected_errors import raises_code


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    onnx_graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "tiny", [x], [y])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(onnx_graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def provider_options(graph: Path, **options: str) -> ProviderOptions:
    return ProviderOptions(graph_hash(graph), options)


@pytest.mark.skipif(PROVIDER not in onnxruntime.get_available_providers(), reason="another build")
def test_provider_that_fails_to_load_is_an_error_without_cpu_fallback(
    graph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if ort_tensorrt_backend.list_cuda_gpus():
        pytest.skip("here it may load")
    with raises_code("broken-installation", MissingDependencyError) as caught:
        open_provider_session(graph, provider_options(graph, trt_fp16_enable="False"))
    assert all(part in str(caught.value) for part in ("model.onnx", PROVIDER))
    assert "Falling back" not in capsys.readouterr().out  # as ONNX Runtime prints, and goes on


def test_changed_graph_is_refused(graph: Path) -> None:
    options = provider_options(graph)
    changed = onnx.load(graph)
    changed.graph.node[0].op_type = "Sub"
    onnx.save(changed, graph)
    with raises_code("changed-file", InputError) as caught:
        open_provider_session(graph, options)
    assert "provider.json" in str(caught.value)


def test_engine_key_depends_on_graph_options_versions_and_gpus(graph: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ort_tensorrt_backend, "list_cuda_gpus", lambda: (("NVIDIA L4", "8.9"),))
    monkeypatch.setattr(ort_tensorrt_backend, "tensorrt_packages", lambda: {"tensorrt-cu13": "10.16.1.11"})
    library = Path("/somewhere/libnvinfer.so.10")
    monkeypatch.setattr(ort_tensorrt_backend, "_cuda_libraries", lambda: [library])
    key = engine_key("abc", {"trt_fp16_enable": "True"})
    assert key == {
        "provider": PROVIDER, "graph_sha256": "abc", "options": {"trt_fp16_enable": "True"},
        "onnxruntime": ort_tensorrt_backend.onnxruntime_version(), "library": str(library),
        "tensorrt": {"tensorrt-cu13": "10.16.1.11"}, "gpus": [["NVIDIA L4", "8.9"]],
    }  # fmt: skip


def test_providers_are_ordered_with_caches_in_the_user_folder(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Any] = []

    def make(path: str, options: Any, providers: Any, enable_fallback: int) -> Any:
        sessions.append((path, providers, enable_fallback))
        return SimpleNamespace(get_providers=lambda: [PROVIDER, "CPUExecutionProvider"])

    monkeypatch.setattr(ort_tensorrt_backend.onnxruntime, "InferenceSession", make)
    monkeypatch.setattr(ort_tensorrt_backend.onnxruntime, "get_available_providers", lambda: [PROVIDER])
    open_provider_session(graph, provider_options(graph, trt_timing_cache_enable="True"))
    ((path, [(name, options), *others], fallback),) = sessions
    assert (path, name, fallback) == (str(graph), PROVIDER, 0)
    assert others == [("CUDAExecutionProvider", {"use_tf32": "0", "device_id": "0"}), "CPUExecutionProvider"]
    assert options["device_id"] == "0"
    folder = Path(options["trt_engine_cache_path"])
    assert folder.parent == tmp_path / "cache" / "smelt" / "ort-tensorrt"
    assert (folder / "made_for.json").is_file()
    assert options["trt_timing_cache_path"] == str(folder.parent)
    monkeypatch.setattr(
        ort_tensorrt_backend.onnxruntime,
        "InferenceSession",
        lambda *a, **k: SimpleNamespace(get_providers=lambda: ["C"]),
    )
    with raises_code("broken-installation", MissingDependencyError) as caught:
        open_provider_session(graph, provider_options(graph))
    assert PROVIDER in str(caught.value)
    monkeypatch.setattr(ort_tensorrt_backend.onnxruntime, "get_available_providers", list)
    with raises_code("not-installed", MissingDependencyError) as caught:
        open_provider_session(graph, provider_options(graph))
    assert PROVIDER in str(caught.value)


def test_second_process_uses_its_own_gpu_in_both_providers(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process of several on a machine has a GPU of its own."""
    seen: list[Any] = []

    def make(path: str, options: Any, providers: Any, enable_fallback: int) -> Any:
        seen.extend(providers)
        return SimpleNamespace(get_providers=lambda: [PROVIDER])

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(device, "is_distributed", lambda: True)
    monkeypatch.setattr(ort_tensorrt_backend.onnxruntime, "InferenceSession", make)
    monkeypatch.setattr(ort_tensorrt_backend.onnxruntime, "get_available_providers", lambda: [PROVIDER])
    open_provider_session(graph, provider_options(graph))
    assert [options["device_id"] for _, options in seen[:2]] == ["1", "1"]
