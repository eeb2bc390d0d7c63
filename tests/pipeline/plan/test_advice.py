"""Orders that run and are poor: a student of its own behind work of which it has nothing."""

import re
from pathlib import Path

import pytest

from tests.support.models import tiny
from tests.support.standins.stage_stand_ins import plan_stages

pytest_plugins = ["tests.support.standins.stage_stand_ins"]


@pytest.mark.parametrize(
    ("stages", "unused"),
    [
        ("[quantize: {scheme: int2}, distill: {student: {model: OTHER}}]", ["quantize"]),
        ("[prune: {}, distill: {student: {config: OTHER}}]", ["prune"]),
        ("[quantize: {}, {finetune: {}, name: tuned}, distill: {student: {model: OTHER}}]",
         ["quantize", "tuned"]),
        ("[{finetune: {}, name: tuned}, distill: {teacher: tuned, student: {model: OTHER}}]", []),
        ("[{finetune: {}, name: tuned}, prune: {}, distill: {teacher: tuned, student: {model: OTHER}}]",
         ["prune"]),
        ("[distill: {student: {model: OTHER}}]", []),
        ("[trim-vocabulary: {size: 40}, distill: {student: {config: OTHER}}]", []),
    ],
)  # fmt: skip
def test_external_student_reports_unused_steps(
    translator: Path, tmp_path: Path, stages: str, unused: list[str]
) -> None:
    other = tiny.write_marian(tmp_path / "other")
    plan = plan_stages(translator, stages.replace("OTHER", str(other)))
    warnings = [warning for warning in plan.warnings if warning.code == "unused-steps"]
    assert [(warning.step, warning.line) for warning in warnings] == [("distill", 4)] * bool(unused)
    assert all(re.findall(r"'(\w+)'", warning.message) == unused for warning in warnings)
