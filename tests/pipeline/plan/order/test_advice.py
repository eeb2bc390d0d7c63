"""Orders that run and are poor: a student of its own behind work of which it has nothing."""

from pathlib import Path

import pytest
import tiny
from planning import plan

pytest_plugins = ["planning"]

BOTH = "nothing of 'quantize' and 'tuned' stays"


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("[quantize: {scheme: int2}, distill: {student: {model: OTHER}}]", "nothing of 'quantize' stays"),
        ("[prune: {}, distill: {student: {config: OTHER}}]", "nothing of 'prune' stays"),
        ("[quantize: {}, {finetune: {}, name: tuned}, distill: {student: {model: OTHER}}]", BOTH),
        ("[{finetune: {}, name: tuned}, distill: {teacher: tuned, student: {model: OTHER}}]", None),
        (
            "[{finetune: {}, name: tuned}, prune: {}, distill: {teacher: tuned, student: {model: OTHER}}]",
            "nothing of 'prune' stays",
        ),
        ("[distill: {student: {model: OTHER}}]", None),
        ("[vocabulary: {size: 40}, distill: {student: {config: OTHER}}]", None),
    ],
)
def test_what_a_student_of_its_own_does_not_go_on_from_is_named(
    translator: Path, tmp_path: Path, stages: str, said: str | None
) -> None:
    other = tiny.marian(tmp_path / "other")
    told = [
        text for text in plan(translator, stages.replace("OTHER", str(other))).warnings if "stays" in text
    ]
    assert len(told) == (said is not None), told
    assert all(said in text and "line 4: distill: its student is another model" in text for text in told)
