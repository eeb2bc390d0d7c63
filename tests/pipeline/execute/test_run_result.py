"""The final output of a run."""

import csv
import io
import shlex
import sys

import pytest

from smelt.pipeline.execute.run_result import Result, report_csv, summary_lines
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
        f'Try      smelt predict {artifact_path} "TEXT"',
        f"Package  smelt package {artifact_path}",
    ]
    for verdict in (None, report["verdict"] | {"step": None}):
        assert summary_lines(Result(report | {"verdict": verdict}, result.folder))[-1].startswith("Report   ")


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
        f"Try      smelt predict {artifact_path} {tried}",
        f"Package  {shipped.format(artifact_path)}",
    ]


def test_program_outside_path_is_printed_with_its_folder(report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [".venv/bin/smelt", "run"])
    result = Result(report, tmp_path)
    for path, program in ((str(tmp_path), ".venv/bin/smelt"), (str(tmp_path / "bin"), "smelt")):
        monkeypatch.setenv("PATH", path)
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "smelt").touch(0o755)
        assert [line.split()[1] for line in summary_lines(result)[-2:]] == [program] * 2


def test_csv_has_intervals_stability_and_cpu_speedups(report):
    step = report["steps"][6]
    sample_report.mark_disturbed(step["latency"][0])
    step["latency"][0].update(cpu_speedup=5.5, cpu_speedup_ci95=[5.0, 6.0])
    row = next(row for row in csv.DictReader(io.StringIO(report_csv(report))) if row["step"] == "onnx-int8")
    score, difference, latency = step["quality"]["bleu"], step["against_baseline"]["bleu"], step["latency"]
    for name, ends in {
        "bleu": score["ci95"],
        "bleu_difference": difference["ci95"],
        "speedup_1": latency[0]["speedup_ci95"],
        "speedup_8": latency[1]["speedup_ci95"],
        "cpu_speedup_1": [5.0, 6.0],
    }.items():
        assert [float(row[f"{name}_{end}"]) for end in ("low", "high")] == ends
    assert (row["cpu_speedup_1"], row["stable_1"]) == ("5.5", "False")
    assert row["stable_8"] in ("", "True")
