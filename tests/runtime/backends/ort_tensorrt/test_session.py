"""Opening graphs with providers of TensorRT: what ONNX Runtime is asked, and what is said where it fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from refusals import refused

from smelt.core.errors import InputError, MissingDependencyError
from smelt.runtime.backends.onnx_session import WHOLE_ACTIVATIONS
from smelt.runtime.backends.ort_tensorrt import session
from smelt.runtime.backends.ort_tensorrt.provider import RTX, TENSORRT
from smelt.runtime.backends.ort_tensorrt.session import made_for, open_session
from smelt.runtime.backends.ort_tensorrt.told import Told
from smelt.runtime.backends.tensorrt_sidecar import hash_of_graph


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    made = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "tiny", [x], [y])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def told(graph: Path, **options: str) -> Told:
    return Told(hash_of_graph(graph), options)


@pytest.mark.skipif(TENSORRT.name not in onnxruntime.get_available_providers(), reason="another build")
def test_a_provider_that_does_not_load_is_an_error_and_not_the_cpu(
    graph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if session.cuda_gpus():
        pytest.skip("here it may load")
    with refused("broken-installation", MissingDependencyError) as caught:
        open_session(TENSORRT, graph, told(graph, trt_fp16_enable="False"))
    assert all(part in str(caught.value) for part in ("model.onnx", TENSORRT.name))
    assert "Falling back" not in capsys.readouterr().out  # as ONNX Runtime prints, and goes on


def test_another_graph_than_the_one_that_was_told_of_is_refused(graph: Path) -> None:
    said = told(graph)
    changed = onnx.load(graph)
    changed.graph.node[0].op_type = "Sub"
    onnx.save(changed, graph)
    with refused("changed-file", InputError) as caught:
        open_session(TENSORRT, graph, said)
    assert "provider.json" in str(caught.value)


def test_an_engine_depends_on_graph_options_versions_and_gpus(graph: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(session, "cuda_gpus", lambda: (("NVIDIA L4", "8.9"),))
    monkeypatch.setattr(session, "tensorrt_packages", lambda: {"tensorrt-cu13": "10.16.1.11"})
    library = Path("/somewhere/libnvinfer.so.10")
    monkeypatch.setattr(session, "_libraries", lambda: [library])
    found = made_for(TENSORRT, "abc", {"trt_fp16_enable": "True"})
    assert found == {
        "provider": TENSORRT.name, "graph_sha256": "abc", "options": {"trt_fp16_enable": "True"},
        "onnxruntime": session.onnxruntime_here(), "tensorrt": {"tensorrt-cu13": "10.16.1.11"},
        "library": str(library), "gpus": [["NVIDIA L4", "8.9"]],
    }  # fmt: skip


def test_providers_come_in_order_with_caches_in_the_users_folder(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def make(path: str, options: Any, providers: Any, enable_fallback: int) -> Any:
        asked.append((path, providers, enable_fallback))
        return SimpleNamespace(get_providers=lambda: [TENSORRT.name, "CPUExecutionProvider"])

    monkeypatch.setattr(session.onnxruntime, "InferenceSession", make)
    monkeypatch.setattr(session.onnxruntime, "get_available_providers", lambda: [TENSORRT.name])
    open_session(TENSORRT, graph, told(graph, trt_timing_cache_enable="True"))
    ((path, [(name, options), *others], fallback),) = asked
    assert (path, name, fallback) == (str(graph), TENSORRT.name, 0)
    assert others == [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]
    folder = Path(options["trt_engine_cache_path"])
    assert folder.parent == tmp_path / "cache" / "smelt" / "ort-tensorrt"
    assert (folder / "made_for.json").is_file()
    assert options["trt_timing_cache_path"] == str(folder.parent)
    monkeypatch.setattr(
        session.onnxruntime, "InferenceSession", lambda *a, **k: SimpleNamespace(get_providers=lambda: ["C"])
    )
    with refused("broken-installation", MissingDependencyError) as caught:
        open_session(TENSORRT, graph, told(graph))
    assert TENSORRT.name in str(caught.value)
    monkeypatch.setattr(session.onnxruntime, "get_available_providers", list)
    with refused("not-installed", MissingDependencyError) as caught:
        open_session(TENSORRT, graph, told(graph))
    assert TENSORRT.name in str(caught.value)


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
        return SimpleNamespace(get_providers=lambda: [RTX.name])

    monkeypatch.setattr(session.onnxruntime, "InferenceSession", make)
    monkeypatch.setattr(session.onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(session, "rtx_devices", lambda: ["first", "second"])
    said = told(graph, nv_max_workspace_size="1")
    open_session(RTX, graph, said)
    path, options = opened[-1]
    compiled = Path(options.entries["ep.context_file_path"])
    assert path == str(graph)
    assert options.entries["ep.context_enable"] == "1"
    told_options = {"nv_max_workspace_size": "1", "nv_runtime_cache_path": str(compiled.parent / "kernels")}
    assert options.devices == [(["first"], told_options)]
    assert compiled.name == "model_ctx.onnx"
    open_session(RTX, graph, said)
    assert opened[-1][0] == str(compiled)
    assert opened[-1][1].entries == dict([WHOLE_ACTIVATIONS])  # nothing is compiled again
    compiled.write_bytes(b"half")  # killed while it was written
    open_session(RTX, graph, said)
    assert [path for path, _ in opened[-2:]] == [str(compiled), str(graph)]
    assert compiled.read_bytes() == b"compiled"
    monkeypatch.setattr(session, "rtx_devices", list)
    with refused("no-gpu", MissingDependencyError):
        open_session(RTX, graph, said)


def test_a_plug_in_that_is_missing_or_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ModuleNotFoundError("no package")

    monkeypatch.setattr(session, "rtx_library", missing)
    with refused("not-installed", MissingDependencyError) as caught:
        session.rtx_devices()
    assert "onnxruntime-ep-nv-tensorrt-rtx" in str(caught.value)
    monkeypatch.setattr(session, "rtx_library", lambda: "/nowhere/lib.so")
    with refused("broken-installation", MissingDependencyError) as caught:
        session.rtx_devices()
    assert "/nowhere/lib.so" in str(caught.value)
