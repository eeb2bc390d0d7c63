"""What a person types: every command on tiny models, and what it says when something is wrong."""

import csv
import io
import json
import os
import subprocess
import sys

import pytest

import smelt
from smelt.cli.main import _checkout_commit, main
from smelt.cli.output import open_standard_streams
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.models import tiny
from tests.support.processes import forked_workers
from tests.support.standins import fake_workers

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 1}
  - prune: {keep_ratio: 0.5}
  - quantize: {}
  - onnx: {}
score: {latency: {batch_sizes: [1], rounds: 3, texts: 2, min_round_ms: 1, threads: 1}}
"""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A finished run of a tiny classifier, with latency."""
    home = tmp_path_factory.mktemp("classifier")
    tiny.write_bert(home / "m")
    tiny.write_labeled(home / "data.jsonl", 8)
    (home / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        fake_workers.ignore_disturbance(patch)
        forked_workers.install(patch)
        result = harness.smelt("run", home / "recipe.yaml", "--out", home / "run", "--quiet")
    assert result.exit_code == 0, result.output
    return home


def test_classifier_run_gives_scored_onnx_artifact(classifier):
    report = json.loads((classifier / "run" / "report.json").read_text())
    steps = {s["name"]: s for s in report["steps"]}
    assert steps["onnx"]["runner"] == "onnxruntime"
    assert steps["onnx"]["quality"]["accuracy"]["n"] == 8
    assert steps["onnx"]["quality"]["accuracy"]["value"] == steps["quantize"]["quality"]["accuracy"]["value"]
    assert steps["onnx"]["latency"][0]["speedup"] > 0
    assert steps["model"]["latency"][0]["speedup"] == 1
    assert steps["onnx"]["peak_memory_bytes"] > 10e6
    assert report["pareto_front"] == []  # random weights are no better than chance
    assert "quantize" not in report["pareto_front"]
    assert {name: s["deployable"] for name, s in steps.items()} == {
        **dict.fromkeys(steps, True),
        "quantize": False,
    }
    assert steps["onnx"]["latency"][0]["parts"]["model_ms"] > 0


def test_repeated_run_reads_latency_from_store(classifier):
    before = json.loads((classifier / "run" / "report.json").read_text())
    assert (
        harness.smelt("run", classifier / "recipe.yaml", "--out", classifier / "run2", "--quiet").exit_code
        == 0
    )
    after = json.loads((classifier / "run2" / "report.json").read_text())
    assert [s["latency"] for s in after["steps"]] == [s["latency"] for s in before["steps"]]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_run_continues_without_terminal_and_report_fails(classifier, monkeypatch):
    run = str(classifier / "run3")
    for arguments, code in (
        (["run", str(classifier / "recipe.yaml"), "--out", run], 0),
        (["report", run], 1),
    ):
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
        open_standard_streams()
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == code
        assert json.loads((classifier / "run3" / "report.json").read_text())["status"] == "passed"


def test_predict_prints_label_with_probability(classifier):
    result = harness.smelt(
        "predict", classifier / "run" / "artifacts" / "onnx", "the cat sleeps", "a man walks"
    )
    lines = result.output.splitlines()
    assert len(lines) == 2
    for line in lines:
        label, probability = line.split("\t")
        assert label in ("LABEL_0", "LABEL_1")
        assert 0.5 <= float(probability) <= 1


def test_eval_equals_report_score(classifier):
    artifact = classifier / "run" / "artifacts" / "onnx"
    result = harness.smelt("eval", artifact, "--data", classifier / "data.jsonl", "--json")
    report = json.loads((classifier / "run" / "report.json").read_text())
    assert json.loads(result.output)["accuracy"] == report["steps"][-1]["quality"]["accuracy"]


def test_report_command_rebuilds_pages(classifier):
    (classifier / "run" / "report.html").unlink()
    result = harness.smelt("report", classifier / "run")
    assert "accuracy" in result.output.lower()
    assert max(map(len, result.output.splitlines()[:8])) <= 80
    assert (classifier / "run" / "report.html").stat().st_size > 5000


def test_report_prints_each_format(classifier):
    run = classifier / "run"
    content = json.loads((run / "report.json").read_text())
    assert json.loads(harness.smelt("report", run, "--format", "json").output) == content
    rows = list(csv.DictReader(io.StringIO(harness.smelt("report", run, "--format", "csv").output)))
    assert [row["step"] for row in rows] == [step["name"] for step in content["steps"]]
    accuracy = [step["quality"]["accuracy"]["value"] for step in content["steps"]]
    assert [float(row["accuracy"]) for row in rows] == accuracy
    assert list(csv.DictReader((run / "report.csv").open())) == rows
    assert harness.smelt("report", run, "--format", "md").output == (run / "report.md").read_text()
    assert harness.smelt("report", run, "--format", "html").output.startswith("<!DOCTYPE html>")
    for name in ("report.svg", "report.png"):
        printed = harness.smelt("report", run, "--format", name[-3:]).stdout_bytes
        assert printed == (run / name).read_bytes()


@pytest.mark.quick
def test_stages_lists_all_and_explains_one():
    stage_list = harness.smelt("stages").output
    for stage_name in ("finetune", "distill", "prune", "factorize", "quantize", "onnx", "tensorrt"):
        assert f"\n{stage_name} " in f"\n{stage_list}"
        explained = harness.smelt("stages", stage_name).output
        assert "settings:" in explained
        assert "source:" in explained
        assert max(map(len, explained.splitlines())) <= 110
    assert max(map(len, stage_list.splitlines())) <= 80


@pytest.mark.parametrize(("arguments", "code", "named"), [
    (["stages", "prun"], "unknown-stage", "'prune'?"),
    (["run", "quickstrat"], "unknown-recipe", "quickstrat"),
    (["predict", "nowhere", "x"], "missing-folder", "nowhere"),
    (["report", "nowhere"], "missing-file", "nowhere"),
    (["eval", "nowhere", "--data", "x"], "missing-folder", "nowhere"),
])  # fmt: skip
def test_invalid_arguments_are_explained_with_exit_code_2(arguments, code, named):
    error = command_error(harness.smelt(*arguments, code=2))
    assert error.code == code
    assert named in str(error)


def test_mistyped_command_suggests_nearest():
    assert "'run'?" in harness.smelt("rnu", code=2).output


def test_changed_artifact_is_rejected(classifier, tmp_path):
    import shutil

    shutil.copytree(classifier / "run" / "artifacts" / "prune", tmp_path / "a")
    weights = tmp_path / "a" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert command_error(harness.smelt("predict", tmp_path / "a", "x", code=2)).code == "changed-file"


def test_module_runs_as_command():
    done = subprocess.run(
        [sys.executable, "-m", "smelt", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[:3] == ["smelt,", "version", smelt.__version__]


def test_version_of_checkout_names_commit(tmp_path):
    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert _checkout_commit(tmp_path) is None
    git("init", "-q")
    assert _checkout_commit(tmp_path) is None  # of somebody else
    (tmp_path / "pyproject.toml").touch()
    git("add", ".")
    git("commit", "-qm", "one")
    assert _checkout_commit(tmp_path) == git("rev-parse", "--short", "HEAD")


def test_help_describes_every_command_within_80_columns():
    lines = harness.smelt("--help").output.split("Commands:")[1].strip().splitlines()
    assert {line.split()[0] for line in lines} == set(main.commands)
    assert all(line.endswith(".") and not line.endswith("...") and len(line) <= 80 for line in lines)


@pytest.mark.parametrize(("error", "code", "named"), [
    (KeyError("weights"), "unforeseen", "KeyError"),
    (PermissionError(13, "Permission denied", "a.jsonl"), "permission-denied", "a.jsonl: Permission denied."),
    (RuntimeError("CPUAllocator: can't allocate memory"), "out-of-memory", "CPUAllocator"),
])  # fmt: skip
def test_commands_show_no_traceback(classifier, tmp_path, monkeypatch, error, code, named):
    def fail(*_, **__):
        raise error

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("smelt.api.evaluate.evaluate_artifact", fail)
    artifact = classifier / "run" / "artifacts" / "onnx"
    result = harness.smelt("eval", artifact, "--data", classifier / "data.jsonl", code=1, expect_bug=True)
    assert f"error[{code}]: smelt eval: " in result.output
    assert named in result.output
    (log,) = tmp_path.glob("smelt-eval-*.log")
    assert "in fail" in log.read_text()
