"""The target openvino in a plan: where it is missing, and what it cannot run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from smelt.core.errors import MissingDependencyError
from smelt.export.onnx_stage import Onnx
from smelt.pipeline.inspect import machine
from tests.support.expected_errors import raises_code
from tests.support.standins.stage_stand_ins import plan_stages

pytest_plugins = ["tests.support.standins.stage_stand_ins"]


def test_missing_openvino_affects_only_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.unavailable_reason(Onnx, "openvino") is None
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "openvino" else find_spec(name))
    assert "openvino>=2026" in str(machine.unavailable_reason(Onnx, "openvino"))
    assert machine.unavailable_reason(Onnx, "ort-cpu") is None


@pytest.mark.usefixtures("stand_ins")
def test_missing_openvino_stops_run_unless_optional(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = "\n  - onnx: {target: ort-cpu}\n  - onnx: {target: openvino}\n    from: model\n    name: ov\n"
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    plan_stages(folder, stages).require_runnable()
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    plan = plan_stages(folder, stages)
    with raises_code("step-unavailable", MissingDependencyError) as excinfo:
        plan.require_runnable()
    assert [message.line for message in excinfo.value.messages] == [6]
    assert f"'ov' cannot run on this machine: {plan.step('ov').unavailable}" in str(excinfo.value)
    plan_stages(folder, stages, "ov.optional=true").require_runnable()
