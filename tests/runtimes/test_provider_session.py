"""Opening graphs with providers of TensorRT: what ONNX Runtime is asked, and what is said where it fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
from expected_errors import raises_code
from onnx import TensorProto, helper

from smelt.core.errors import InputError, MissingDependencyError
from smelt.runtimes import ort_tensorrt_session
from smelt.runtimes.onnx_session import FLOAT_ACTIVATIONS_OPTION
from smelt.runtimes.ort_tensorrt_options import ProviderOptions
from smelt.runtimes.ort_tensorrt_provider import RTX_PROVIDER, TENSORRT_PROVIDER
from smelt.runtimes.ort_tensorrt_session import engine_key, open_provider_session
from smelt.runtimes.tensorrt_sidecar import graph_hash


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    made = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "tiny", [x], [y])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def told(graph: Path, **options: str) -> ProviderOptions:
    return ProviderOptions(graph_hash(graph), options)


@pytest.mark.skipif(
    TENSORRT_PROVIDER.name not in onnxruntime.get_available_providers(), reason="another build"
)
def test_a_provider_that_does_not_load_is_an_error_and_not_the_cpu(
    graph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if ort_tensorrt_session.list_cuda_gpus():
        pytest.skip("here it may load")
    with raises_code("broken-installation", MissingDependencyError) as caught:
        open_provider_session(TENSORRT_PROVIDER, graph, told(graph, trt_fp16_enable="False"))
    assert all(part in str(caught.value) for part in ("model.onnx", TENSORRT_PROVIDER.name))
    assert "Falling back" not in capsys.readouterr().out  # as ONNX Runtime prints, and goes on


def test_another_graph_than_the_one_that_was_told_of_is_refused(graph: Path) -> None:
    said = told(graph)
    changed = onnx.load(graph)
    changed.graph.node[0].op_type = "Sub"
    onnx.save(changed, graph)
    with raises_code("changed-file", InputError) as caught:
        open_provider_session(TENSORRT_PROVIDER, graph, said)
    assert "provider.json" in str(caught.value)


def test_an_engine_depends_on_graph_options_versions_and_gpus(graph: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ort_tensorrt_session, "list_cuda_gpus", lambda: (("NVIDIA L4", "8.9"),))
    monkeypatch.setattr(ort_tensorrt_session, "tensorrt_packages", lambda: {"tensorrt-cu13": "10.16.1.11"})
    library = Path("/somewhere/libnvinfer.so.10")
    monkeypatch.setattr(ort_tensorrt_session, "_cuda_libraries", lambda: [library])
    found = engine_key(TENSORRT_PROVIDER, "abc", {"trt_fp16_enable": "True"})
    assert found == {
        "provider": TENSORRT_PROVIDER.name, "graph_sha256": "abc", "options": {"trt_fp16_enable": "True"},
        "onnxruntime": ort_tensorrt_session.onnxruntime_version(), "tensorrt": {"tensorrt-cu13": "10.16.1.11"},
        "library": str(library), "gpus": [["NVIDIA L4", "8.9"]],
    }  # fmt: skip


def test_providers_come_in_order_with_caches_in_the_users_folder(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def make(path: str, options: Any, providers: Any, enable_fallback: int) -> Any:
        asked.append((path, providers, enable_fallback))
        return SimpleNamespace(get_providers=lambda: [TENSORRT_PROVIDER.name, "CPUExecutionProvider"])

    monkeypatch.setattr(ort_tensorrt_session.onnxruntime, "InferenceSession", make)
    monkeypatch.setattr(
        ort_tensorrt_session.onnxruntime, "get_available_providers", lambda: [TENSORRT_PROVIDER.name]
    )
    open_provider_session(TENSORRT_PROVIDER, graph, told(graph, trt_timing_cache_enable="True"))
    ((path, [(name, options), *others], fallback),) = asked
    assert (path, name, fallback) == (str(graph), TENSORRT_PROVIDER.name, 0)
    assert others == [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]
    folder = Path(options["trt_engine_cache_path"])
    assert folder.parent == tmp_path / "cache" / "smelt" / "ort-tensorrt"
    assert (folder / "made_for.json").is_file()
    assert options["trt_timing_cache_path"] == str(folder.parent)
    monkeypatch.setattr(
        ort_tensorrt_session.onnxruntime,
        "InferenceSession",
        lambda *a, **k: SimpleNamespace(get_providers=lambda: ["C"]),
    )
    with raises_code("broken-installation", MissingDependencyError) as caught:
        open_provider_session(TENSORRT_PROVIDER, graph, told(graph))
    assert TENSORRT_PROVIDER.name in str(caught.value)
    monkeypatch.setattr(ort_tensorrt_session.onnxruntime, "get_available_providers", list)
    with raises_code("not-installed", MissingDependencyError) as caught:
        open_provider_session(TENSORRT_PROVIDER, graph, told(graph))
    assert TENSORRT_PROVIDER.name in str(caught.value)


class Options:
    """Notes what `SessionOptions` is told."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.devices: list[Any] = []

    def add_session_config_entry(self, name: str, value: str) -> None:
        self.entries[name] = value

    def add_provider_for_devices(self, devices: Any, told: dict[str, str]) -> None:
        self.devices.append((devices, told))


def test_the_plug_in_compiles_once_and_is_then_given_what_it_compiled(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, Options]] = []

    def make(path: str, options: Options, providers: Any, enable_fallback: int) -> Any:
        opened.append((path, options))
        if Path(path).read_bytes() == b"half":
            raise RuntimeError("no protobuf")
        if "ep.context_enable" in options.entries:
            Path(options.entries["ep.context_file_path"]).write_bytes(b"compiled")
        return SimpleNamespace(get_providers=lambda: [RTX_PROVIDER.name])

    monkeypatch.setattr(ort_tensorrt_session.onnxruntime, "InferenceSession", make)
    monkeypatch.setattr(ort_tensorrt_session.onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(ort_tensorrt_session, "rtx_devices", lambda: ["first", "second"])
    said = told(graph, nv_max_workspace_size="1")
    open_provider_session(RTX_PROVIDER, graph, said)
    path, options = opened[-1]
    compiled = Path(options.entries["ep.context_file_path"])
    assert path == str(graph)
    assert options.entries["ep.context_enable"] == "1"
    told_options = {"nv_max_workspace_size": "1", "nv_runtime_cache_path": str(compiled.parent / "kernels")}
    assert options.devices == [(["first"], told_options)]
    assert compiled.name == "model_ctx.onnx"
    open_provider_session(RTX_PROVIDER, graph, said)
    assert opened[-1][0] == str(compiled)
    assert opened[-1][1].entries == dict([FLOAT_ACTIVATIONS_OPTION])  # nothing is compiled again
    compiled.write_bytes(b"half")  # killed while it was written
    open_provider_session(RTX_PROVIDER, graph, said)
    assert [path for path, _ in opened[-2:]] == [str(compiled), str(graph)]
    assert compiled.read_bytes() == b"compiled"
    monkeypatch.setattr(ort_tensorrt_session, "rtx_devices", list)
    with raises_code("no-gpu", MissingDependencyError):
        open_provider_session(RTX_PROVIDER, graph, said)


def test_a_plug_in_that_is_missing_or_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ModuleNotFoundError("no package")

    monkeypatch.setattr(ort_tensorrt_session, "find_rtx_plugin", missing)
    with raises_code("not-installed", MissingDependencyError) as caught:
        ort_tensorrt_session.rtx_devices()
    assert "onnxruntime-ep-nv-tensorrt-rtx" in str(caught.value)
    monkeypatch.setattr(ort_tensorrt_session, "find_rtx_plugin", lambda: "/nowhere/lib.so")
    with raises_code("broken-installation", MissingDependencyError) as caught:
        ort_tensorrt_session.rtx_devices()
    assert "/nowhere/lib.so" in str(caught.value)
