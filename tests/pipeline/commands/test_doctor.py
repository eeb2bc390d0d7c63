from collections.abc import Iterator
from typing import Any

import pytest

from smelt.commands import doctor
from smelt.commands.doctor import Finding, describe, diagnose


def test_diagnose_tries_torch_and_onnxruntime_on_the_cpu() -> None:
    findings = {(f.group, f.name): f for f in diagnose()}
    assert findings["runtimes", "torch cpu"].ok
    assert findings["runtimes", "onnxruntime cpu"].ok
    assert findings["packages", "transformers"].ok
    for finding in findings.values():
        if finding.group == "runtimes" and not finding.ok:
            assert finding.remedy, f"{finding.name} does not say how to get it"


def test_missing_package_is_told_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smelt.runtime.backends.tensorrt_module.find_tensorrt", lambda: None)
    (finding,) = doctor._engines()
    assert finding == Finding(
        "runtimes",
        "tensorrt",
        False,
        "tensorrt is not installed",
        "with an NVIDIA GPU: pip install tensorrt",
    )


def test_openvino_is_tried_and_told_how_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "smelt.runtime.backends.openvino_module"
    monkeypatch.setattr(f"{module}.has_bf16", lambda: False)
    (finding,) = doctor._openvino()
    assert (finding.name, finding.ok) == ("openvino", True)
    assert finding.detail.endswith("for target openvino; no bf16 on this processor")
    monkeypatch.setattr(f"{module}.has_openvino", lambda: False)
    (finding,) = doctor._openvino()
    assert (finding.ok, finding.detail) == (False, "openvino is not installed")
    assert finding.remedy == "pip install 'openvino>=2026'"


def test_runtimes_that_no_target_uses_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    from smelt.export.stage.settings import OnnxSettings
    from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS

    every = ["TensorrtExecutionProvider", "CoreMLExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: every)
    monkeypatch.setattr("smelt.evaluate.environment.version", lambda name: "1.0")  # all is installed
    findings = diagnose()
    named = {f.name for f in findings if f.group == "runtimes"}
    assert named == {
        "torch cpu",
        "torch cpu bf16",
        "torch cuda",
        "onnxruntime cpu",
        "onnxruntime cuda",
        "onnxruntime tensorrt",
        "onnxruntime tensorrt-rtx",
        "openvino",
        "tensorrt",
    }
    targets = set(OnnxSettings.model_json_schema()["properties"]["target"]["enum"])
    assert targets == {*doctor._PROVIDERS, *PROVIDERS, "openvino", "tensorrt"}
    assert "bitsandbytes" in {f.name for f in findings if f.group == "packages"}


def test_cuda_that_has_no_gpu_is_not_blamed_on_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr("smelt.look.machine.has_cuda", lambda: False)
    (finding,) = [f for f in doctor._onnxruntime() if f.name == "onnxruntime cuda"]
    assert (finding.ok, finding.detail) == (False, "no NVIDIA GPU with a working driver")


def test_tensorrt_in_onnx_runtime_is_told_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "smelt.runtime.backends.ort_tensorrt.provider"
    monkeypatch.setattr("smelt.look.machine.has_cuda", lambda: False)
    monkeypatch.setattr(f"{module}.lack_of_package", lambda target: f"{target}: pip install it")
    found = list(doctor._providers())
    assert [f.name for f in found] == ["onnxruntime tensorrt", "onnxruntime tensorrt-rtx"]
    assert {(f.ok, f.detail) for f in found} == {(False, "no NVIDIA GPU with a working driver")}
    assert [f.remedy for f in found] == ["ort-tensorrt: pip install it", "ort-tensorrt-rtx: pip install it"]
    monkeypatch.setattr("smelt.look.machine.has_cuda", lambda: True)
    monkeypatch.setattr(f"{module}.lack_of", lambda target: f"{target} lacks")
    assert [f.remedy for f in doctor._providers()] == ["ort-tensorrt lacks", "ort-tensorrt-rtx lacks"]
    monkeypatch.setattr(f"{module}.lack_of", lambda target: None)
    monkeypatch.setattr(
        "smelt.runtime.backends.ort_tensorrt.session.open_session",
        lambda provider, path, told: Doubling(told.sha256),
    )
    assert [(f.ok, f.detail.split(", ")[1]) for f in doctor._providers()] == [
        (True, "for target ort-tensorrt"), (True, "for target ort-tensorrt-rtx"),
    ]  # fmt: skip


class Doubling:
    """A session of the tiny graph."""

    def __init__(self, sha256: str) -> None:
        assert len(sha256) == 64

    def run(self, names: None, feeds: Any) -> list[Any]:
        return [2 * feeds["x"]]


def test_a_probe_that_breaks_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _torch() -> Iterator[Finding]:
        yield Finding("runtimes", "torch cpu", True, "")
        raise OSError("libtorch.so: wrong architecture\nand more lines")

    monkeypatch.setattr(doctor, "_torch", _torch)
    findings = diagnose()
    assert Finding("runtimes", "torch", False, "libtorch.so: wrong architecture") in findings
    assert any(f.name == "onnxruntime cpu" for f in findings), "the others are still looked at"


def test_description_fits_80_columns_and_marks_what_is_missing() -> None:
    findings = [
        Finding("packages", "torch", True, "2.13.0"),
        Finding("runtimes", "tensorrt", False, "word " * 40, "pip install tensorrt"),
        Finding("machine", "processor", None, "x" * 300),
    ]
    lines = describe(findings).splitlines()
    assert max(map(len, lines)) <= 80
    assert "  + torch  2.13.0" in [line.rstrip() for line in lines]
    assert any(line.startswith("  - tensorrt") for line in lines)
    assert any("-> pip install tensorrt" in line for line in lines)


@pytest.mark.parametrize("works", [True, False])
def test_bf16_is_tried_and_not_believed(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    monkeypatch.setattr("smelt.runtime.backends.device.bf16_gain", lambda: 0.6 if works else 0.0)
    (finding,) = [f for f in doctor._torch() if f.name == "torch cpu bf16"]
    assert finding.ok is works
    assert ("ends the process" in finding.detail) is not works
