"""The final output of a run."""

import shlex

import pytest

from smelt.pipeline.execute.run_result import Result, summary_lines
from tests.support.standins import sample_report


@pytest.fixture
def report():
    """The sample, whose onnx-int8 is accepted by its gate."""
    ten_steps = sample_report.ten_step_report()
    ten_steps["steps"][6]["gates"] = [gate := ten_steps["steps"][6]["gates"][0]]
    gate["passed"] = True
    return sample_report.with_verdict(ten_steps)


def test_summary_shows_predict_and_package_commands(report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = Result(report, tmp_path / "runs" / "my run")
    artifact_path = shlex.quote("runs/my run/artifacts/onnx-int8")
    assert summary_lines(result)[-2:] == [
        f'Try it: smelt predict {artifact_path} "TEXT"',
        f"Ship it: smelt package {artifact_path}",
    ]
    for verdict in (None, report["verdict"] | {"step": None}):
        assert summary_lines(Result(report | {"verdict": verdict}, result.folder))[-1].startswith("Report: ")


@pytest.mark.parametrize(("task", "tried", "shipped"), [
    # third-party graphs that generate have no graph with the loop
    ("translation", '"TEXT"', "smelt package {} --format optimum"),
    ("text-classification", '"TEXT"', "smelt package {}"),
    ("image-classification", "IMAGE.png", "smelt package {}"), ("custom", "--data FILE.npz", "cp -rL {} NEW"),
])  # fmt: skip
def test_summary_commands_match_task(report, tmp_path, task, tried, shipped):
    for step in report["steps"]:
        step["details"] = {"foreign": True}
    report["recipe"]["task"] = task
    artifact_path = tmp_path / "artifacts" / "onnx-int8"
    assert summary_lines(Result(report, tmp_path))[-2:] == [
        f"Try it: smelt predict {artifact_path} {tried}",
        f"Ship it: {shipped.format(artifact_path)}",
    ]
