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
    made = plan_stages(translator, stages.replace("OTHER", str(other)))
    found = [one for one in made.warnings if one.code == "unused-steps"]
    assert [(one.step, one.line) for one in found] == [("distill", 4)] * bool(unused)
    assert all(re.findall(r"'(\w+)'", one.message) == unused for one in found)
