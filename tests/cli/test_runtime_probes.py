"""Each runtime is tried; a missing one is reported with its installation command."""

import re
from typing import Any

import pytest

from smelt.cli import doctor
from smelt.cli.doctor import CheckResult


def test_missing_package_has_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smelt.runtimes.tensorrt_engine.find_tensorrt", lambda: None)
    (finding,) = doctor.try_engines()
    assert finding == CheckResult(
        "runtimes",
        "tensorrt",
        False,
        "tensorrt is not installed",
        "with an NVIDIA GPU: pip install tensorrt",
    )


def test_openvino_is_probed_with_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "smelt.runtimes.openvino_backend"
    monkeypatch.setattr(f"{module}.has_bf16", lambda: False)
    (finding,) = doctor.try_openvino()
    assert (finding.name, finding.ok) == ("openvino", True)
    assert re.fullmatch(r"openvino [\d.]+, for target openvino; no bf16 .*", finding.detail)
    monkeypatch.setattr(f"{module}.has_openvino", lambda: False)
    (finding,) = doctor.try_openvino()
    assert (finding.ok, finding.detail) == (False, "openvino is not installed")
    assert finding.remedy == "pip install 'openvino>=2026'"


def test_cuda_without_gpu_is_not_blamed_on_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr("smelt.pipeline.inspect.machine.has_cuda", lambda: False)
    (finding,) = [f for f in doctor.try_onnxruntime() if f.name == "onnxruntime cuda"]
    assert (finding.ok, finding.detail) == (False, "no NVIDIA GPU with a working driver")


def test_ort_tensorrt_probe_reports_missing_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "smelt.runtimes.ort_tensorrt_provider"
    monkeypatch.setattr("smelt.pipeline.inspect.machine.has_cuda", lambda: False)
    monkeypatch.setattr(f"{module}.missing_package", lambda: "pip install it")
    (finding,) = doctor.try_ort_tensorrt()
    assert (finding.name, finding.ok) == ("onnxruntime tensorrt", False)
    assert finding.detail == "no NVIDIA GPU with a working driver"
    assert finding.remedy == "pip install it"
    monkeypatch.setattr("smelt.pipeline.inspect.machine.has_cuda", lambda: True)
    monkeypatch.setattr(f"{module}.missing_requirement", lambda: "lacks")
    assert [f.remedy for f in doctor.try_ort_tensorrt()] == ["lacks"]
    monkeypatch.setattr(f"{module}.missing_requirement", lambda: None)
    monkeypatch.setattr(
        "smelt.runtimes.ort_tensorrt_backend.open_provider_session",
        lambda path, options: Doubling(options.sha256),
    )
    (finding,) = doctor.try_ort_tensorrt()
    assert (finding.ok, finding.detail.split(", ")[1]) == (True, "for target ort-tensorrt")


class Doubling:
    """A session of the tiny graph."""

    def __init__(self, sha256: str) -> None:
        assert len(sha256) == 64

    def run(self, names: None, feeds: Any) -> list[Any]:
        return [2 * feeds["x"]]


@pytest.mark.parametrize("works", [True, False])
def test_bf16_support_is_measured(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    monkeypatch.setattr("smelt.runtimes.device.bf16_speedup", lambda: 0.6 if works else 0.0)
    (finding,) = [f for f in doctor.try_torch() if f.name == "torch cpu bf16"]
    assert finding.ok is works
