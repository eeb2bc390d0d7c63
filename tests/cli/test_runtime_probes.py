"""Each runtime is tried, and what is missing is told with the way to get it."""

from typing import Any

import pytest

from smelt.cli.main import doctor
from smelt.cli.options import CheckResult


def test_missing_package_is_told_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smelt.runtimes.tensorrt_module.find_tensorrt", lambda: None)
    (finding,) = doctor.try_engines()
    assert finding == CheckResult(
        "runtimes",
        "tensorrt",
        False,
        "tensorrt is not installed",
        "with an NVIDIA GPU: pip install tensorrt",
    )


def test_openvino_is_tried_and_told_how_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "smelt.runtimes.openvino_backend"
    monkeypatch.setattr(f"{module}.has_bf16", lambda: False)
    (finding,) = doctor.try_openvino()
    assert (finding.name, finding.ok) == ("openvino", True)
    assert finding.detail.endswith("for target openvino; no bf16 on this processor")
    monkeypatch.setattr(f"{module}.has_openvino", lambda: False)
    (finding,) = doctor.try_openvino()
    assert (finding.ok, finding.detail) == (False, "openvino is not installed")
    assert finding.remedy == "pip install 'openvino>=2026'"


def test_cuda_that_has_no_gpu_is_not_blamed_on_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr("smelt.pipeline.inspect.machine.has_cuda", lambda: False)
    (finding,) = [f for f in doctor.try_onnxruntime() if f.name == "onnxruntime cuda"]
    assert (finding.ok, finding.detail) == (False, "no NVIDIA GPU with a working driver")


def test_tensorrt_in_onnx_runtime_is_told_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "smelt.runtimes.ort_tensorrt_provider"
    monkeypatch.setattr("smelt.pipeline.inspect.machine.has_cuda", lambda: False)
    monkeypatch.setattr(f"{module}.missing_package", lambda target: f"{target}: pip install it")
    found = list(doctor.try_providers())
    assert [f.name for f in found] == ["onnxruntime tensorrt", "onnxruntime tensorrt-rtx"]
    assert {(f.ok, f.detail) for f in found} == {(False, "no NVIDIA GPU with a working driver")}
    assert [f.remedy for f in found] == ["ort-tensorrt: pip install it", "ort-tensorrt-rtx: pip install it"]
    monkeypatch.setattr("smelt.pipeline.inspect.machine.has_cuda", lambda: True)
    monkeypatch.setattr(f"{module}.missing_requirement", lambda target: f"{target} lacks")
    assert [f.remedy for f in doctor.try_providers()] == [
        "ort-tensorrt lacks",
        "ort-tensorrt-rtx lacks",
    ]
    monkeypatch.setattr(f"{module}.missing_requirement", lambda target: None)
    monkeypatch.setattr(
        "smelt.runtimes.ort_tensorrt_session.open_provider_session",
        lambda provider, path, told: Doubling(told.sha256),
    )
    assert [(f.ok, f.detail.split(", ")[1]) for f in doctor.try_providers()] == [
        (True, "for target ort-tensorrt"), (True, "for target ort-tensorrt-rtx"),
    ]  # fmt: skip


class Doubling:
    """A session of the tiny graph."""

    def __init__(self, sha256: str) -> None:
        assert len(sha256) == 64

    def run(self, names: None, feeds: Any) -> list[Any]:
        return [2 * feeds["x"]]


@pytest.mark.parametrize("works", [True, False])
def test_bf16_is_tried_and_not_believed(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    monkeypatch.setattr("smelt.runtimes.device.bf16_speedup", lambda: 0.6 if works else 0.0)
    (finding,) = [f for f in doctor.try_torch() if f.name == "torch cpu bf16"]
    assert finding.ok is works
    assert ("ends the process" in finding.detail) is not works
