"""What a package tells of its artifact: from the run, wherever the artifact was named."""

import json
import shutil

import pytest

from smelt.api.package import package_origin, run_artifacts
from smelt.api.scored_run import find_run
from smelt.core.artifact import read_artifact
from smelt.core.files import write_hashed_json
from smelt.core.messages import message_codes
from smelt.evaluate.report.verdict import UNFINISHED
from tests.support.graphs import exported_artifacts


@pytest.fixture(scope="module")
def run():
    return exported_artifacts.exported_artifact("translator").parents[1]


def test_run_is_found_by_link_and_in_store(run):
    link = run / "artifacts" / "onnx"
    artifact = read_artifact(link)
    assert find_run(link, artifact) == (run, "onnx")
    assert find_run(artifact.path, artifact) == (run.resolve(), "onnx")


def test_copied_artifact_has_no_run(run, tmp_path):
    copy = tmp_path / "onnx"
    shutil.copytree(run / "artifacts" / "onnx", copy)
    artifact = read_artifact(copy)
    assert find_run(copy, artifact) is None
    assert package_origin(artifact, None, "onnx").run is None


def test_run_of_other_artifact_with_same_name_is_ignored(run, tmp_path):
    artifact_path = tmp_path / "run" / "artifacts" / "onnx"
    shutil.copytree(run / "artifacts" / "model", artifact_path)
    shutil.copy(run / "report.json", tmp_path / "run")
    assert find_run(artifact_path, read_artifact(artifact_path)) is None


def test_package_origin_has_run_steps_and_scores(run):
    origin = package_origin(read_artifact(run / "artifacts" / "onnx"), run, "onnx")
    report = json.loads((run / "report.json").read_text())
    assert (origin.run, origin.model) == ("recipe", "m")
    assert [(step.name, step.stage) for step in origin.steps] == [("model", "model"), ("onnx", "onnx")]
    assert dict(origin.generation) == {"max_new_tokens": 4}
    assert origin.latencies == ()
    bleu = origin.scores[0]
    bleu_score = report["steps"][1]["quality"]["bleu"]
    assert bleu.metric == "BLEU"
    assert (
        bleu.text == f"{bleu_score['value']:.2f} [{bleu_score['ci95'][0]:.2f}, {bleu_score['ci95'][1]:.2f}]"
    )
    assert (bleu.n, bleu.signature) == (bleu_score["n"], bleu_score["signature"])
    assert (
        bleu.baseline
        == f"{bleu_score['value']:.2f} [{bleu_score['ci95'][0]:.2f}, {bleu_score['ci95'][1]:.2f}]"
    )
    assert all(score.baseline is None for score in package_origin(None, run, "model").scores)


def test_package_origin_has_settings_license_and_latency(run, tmp_path):
    for name in ("model", "onnx"):
        shutil.copytree(run / "artifacts" / name, tmp_path / "artifacts" / name)
    path = tmp_path / "artifacts" / "model" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["details"]["license"] = "mit (its model card)"
    write_hashed_json(path, manifest)
    report = json.loads((run / "report.json").read_text())
    report["recipe"]["stages"] = [{"onnx": {"opset": 20}, "name": "onnx"}]
    row = {"batch_size": 2, "threads": 1, "p50_ms": 3.456, "stable": True, "speedup": 2.0}
    disturbed_row = {"batch_size": 4, "p50_ms": 30.0, "stable": False, "reason": "busy", "speedup": 9.0}
    interval = {"speedup_ci95": [1.5, 2.5]}
    report["steps"][1]["latency"] = [row | interval, disturbed_row | interval]
    (tmp_path / "report.json").write_text(json.dumps(report))
    origin = package_origin(None, tmp_path, "onnx")
    assert origin.license == "mit (its model card)"
    assert dict(origin.steps[1].settings) == {"opset": 20}
    first, second = origin.latencies
    assert first.startswith(
        "3.46 ms (median) at batch 2, threads: 1: 2.00 times as fast as model [1.50, 2.50]; "
    )
    assert second.startswith("30 ms (median) at batch 4, threads: all (measurement disturbed")
    assert "disturbed" not in first


def test_damaged_report_is_ignored(run, tmp_path):
    (tmp_path / "report.json").write_text("{")
    artifact = read_artifact(run / "artifacts" / "onnx")
    assert package_origin(artifact, tmp_path, "onnx").run is None


def test_run_artifacts_are_listed(run, tmp_path):
    assert set(run_artifacts(run)) == {"model", "onnx"}
    (tmp_path / "artifacts" / "broken").mkdir(parents=True)
    assert run_artifacts(tmp_path) == {}


@pytest.mark.parametrize("gates", [{"size_bytes": {"max": 1000}}, {}])
def test_package_of_unfinished_run_warns_about_gates(run, tmp_path, gates):
    """Interrupted, killed or still running: a failed gate would be silent."""
    report = json.loads((run / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert "run-not-finished" not in message_codes(package_origin(None, tmp_path, "onnx").warnings)
    report["recipe"]["gates"] = gates
    report["status"], report["verdict"] = "interrupted", UNFINISHED.model_dump(mode="json")
    for step in report["steps"]:
        step["gates"] = []
    (tmp_path / "report.json").write_text(json.dumps(report))
    warnings = package_origin(None, tmp_path, "onnx").warnings
    assert message_codes(warnings)[:1] == ["run-not-finished"]
    assert all(name in str(warnings[0]) for name in gates)
