"""TensorRT in a plan, where it can and where it cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from smelt.core.errors import MissingDependencyError
from smelt.pipeline.inspect import machine
from tests.support.expected_errors import raises_code
from tests.support.standins.stage_stand_ins import plan_stages

pytest_plugins = ["tests.support.standins.stage_stand_ins"]
pytestmark = pytest.mark.usefixtures("stand_ins")


def test_missing_tensorrt_stops_run_unless_optional(folder: Path) -> None:
    stages = "\n  - onnx: {target: tensorrt}\n  - tensorrt: {}\n"
    plan = plan_stages(folder, stages)
    with raises_code("step-unavailable", MissingDependencyError) as excinfo:
        plan.require_runnable()
    assert excinfo.value.exit_code == 2
    [error] = excinfo.value.messages
    assert (error.file, error.line) == (str(folder / "recipe.yaml"), 6)
    assert f"'tensorrt' cannot run on this machine: {plan.step('tensorrt').unavailable}" in error.message
    plan_stages(folder, stages, "tensorrt.optional=true").require_runnable()
    plan_stages(folder, stages, until="onnx").require_runnable()


def test_tensorrt_requires_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    plan = plan_stages(folder, "[{onnx: {target: tensorrt}}, tensorrt]")
    assert plan.step("tensorrt").unavailable is not None
    assert plan.step("tensorrt").unscored is not None
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    assert plan_stages(folder, "[{onnx: {target: tensorrt}}, tensorrt]").step("tensorrt").unavailable is None


def test_tensorrt_built_without_gpu_is_planned_but_not_scored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    monkeypatch.setattr(machine, "can_build_without_gpu", lambda: True)
    stages = "[{onnx: {target: tensorrt}}, tensorrt]"
    plan = plan_stages(folder, stages, "gates={bleu: {max_degradation: 1}}", "baseline=tensorrt")
    step = plan.step("tensorrt")
    assert step.unavailable is None
    assert step.unscored is not None
    assert plan.gates[0].at == ("onnx",)  # the last step of the branch that has a score
    [warning] = plan.warnings
    assert warning.code == "no-comparison"
    assert f"'tensorrt': {step.unscored}" in warning.message
    assert "built, not scored (needs a CUDA GPU)" in " ".join(str(plan).split())
    assert plan.step("onnx").unscored is None
    plan.require_runnable()


def test_builder_without_gpu_is_tried_in_separate_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(builder: str) -> bool:
        text = f"class Logger:\n    ERROR = 1\n    def __init__(self, level): pass\n{builder}\n"
        (tmp_path / "tensorrt.py").write_text(text)
        machine.can_build_without_gpu.cache_clear()
        return machine.can_build_without_gpu()

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert answer("Builder = lambda logger: object()")
        assert not answer("Builder = lambda logger: None")
        assert not answer("def Builder(logger): raise TypeError('factory function returned nullptr')")
        assert not answer("import os; os.abort()")
    finally:
        machine.can_build_without_gpu.cache_clear()
