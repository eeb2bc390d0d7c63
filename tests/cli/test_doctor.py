from collections.abc import Iterator

import pytest

from smelt.cli import doctor
from smelt.cli.doctor import CheckResult, format_check_results, run_checks


def test_run_checks_tries_torch_and_onnxruntime_on_cpu() -> None:
    findings = {(f.group, f.name): f for f in run_checks()}
    assert findings["runtimes", "torch cpu"].ok
    assert findings["runtimes", "onnxruntime cpu"].ok
    assert findings["packages", "transformers"].ok
    for finding in findings.values():
        if finding.group == "runtimes" and not finding.ok:
            assert finding.remedy, f"{finding.name} does not say how to get it"


def test_runtimes_without_target_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    from smelt.export.settings import OnnxSettings

    every = ["TensorrtExecutionProvider", "CoreMLExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: every)
    everywhere = "smelt.evaluate.environment.package_versions"
    monkeypatch.setattr(everywhere, lambda names: dict.fromkeys(names, "1.0"))
    monkeypatch.setattr(doctor, "_test_bf16", lambda: "")  # it takes seconds
    findings = run_checks()
    runtime_names = {f.name for f in findings if f.group == "runtimes"}
    assert runtime_names == {
        "torch cpu",
        "torch cpu bf16",
        "torch cuda",
        "onnxruntime cpu",
        "onnxruntime cuda",
        "onnxruntime tensorrt",
        "openvino",
        "tensorrt",
    }
    targets = set(OnnxSettings.model_json_schema()["properties"]["target"]["enum"])
    assert targets == {*doctor.TARGET_PROVIDERS, "ort-tensorrt", "openvino", "tensorrt"}
    assert "bitsandbytes" in {f.name for f in findings if f.group == "packages"}


def test_failing_probe_becomes_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_torch() -> Iterator[CheckResult]:
        yield CheckResult("runtimes", "torch cpu", True, "")
        raise OSError("libtorch.so: wrong architecture\nand more lines")

    monkeypatch.setattr(doctor, "try_torch", try_torch)
    findings = run_checks()
    assert CheckResult("runtimes", "torch", False, "libtorch.so: wrong architecture") in findings
    assert any(f.name == "onnxruntime cpu" for f in findings), "the others are still looked at"


def test_check_results_fit_80_columns_and_mark_missing() -> None:
    findings = [
        CheckResult("packages", "torch", True, "2.13.0"),
        CheckResult("runtimes", "tensorrt", False, "word " * 40, "pip install tensorrt"),
        CheckResult("machine", "processor", None, "x" * 300),
    ]
    lines = format_check_results(findings).splitlines()
    assert max(map(len, lines)) <= 80
    assert "  + torch  2.13.0" in [line.rstrip() for line in lines]
    assert any(line.startswith("  - tensorrt") for line in lines)
    assert any("-> pip install tensorrt" in line for line in lines)
