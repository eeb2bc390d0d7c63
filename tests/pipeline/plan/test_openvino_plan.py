"""The target openvino in a plan: where it is missing, and what it cannot run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from planning import plan

from smelt.core.errors import MissingDependencyError
from smelt.export.onnx_stage import Onnx
from smelt.look import machine

pytest_plugins = ["planning"]


def test_a_missing_openvino_is_a_reason_for_its_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.unavailable_reason(Onnx, "openvino") is None
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "openvino" else find_spec(name))
    reason = "OpenVINO is not installed (pip install 'openvino>=2026')."
    assert machine.unavailable_reason(Onnx, "openvino") == reason
    assert machine.unavailable_reason(Onnx, "ort-cpu") is None


@pytest.mark.usefixtures("stand_ins")
def test_a_missing_openvino_stops_a_run_before_any_work_unless_optional(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = "\n  - onnx: {target: ort-cpu}\n  - onnx: {target: openvino}\n    from: model\n    name: ov\n"
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    plan(folder, stages).require_runnable()
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"step 'ov' cannot run here: OpenVINO is not installed"):
        plan(folder, stages).require_runnable()
    plan(folder, stages, "ov.optional=true").require_runnable()
