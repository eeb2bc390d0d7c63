"""The surface in Python: smelt.run and smelt.load do what the command line does."""

import json
import subprocess
import sys

import numpy as np
import pytest

import smelt
from smelt.pipeline.execute.run_result import summary_lines
from smelt.pipeline.execute.step_runner import StepRunner
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

RECIPE = """
model: m
task: {task}
data: {{test: data.jsonl}}
stages: {stages}
score: {{latency: false, generation: {{max_new_tokens: 6}}}}
"""


def _home(folder, task, stages):
    (tiny.write_marian if task == "translation" else tiny.write_bert)(folder / "m")
    (tiny.write_pairs if task == "translation" else tiny.write_labeled)(folder / "data.jsonl", 8)
    (folder / "recipe.yaml").write_text(RECIPE.format(task=task, stages=stages))
    return folder


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    home = _home(tmp_path_factory.mktemp("translator"), "translation", "[quantize]")
    return home, smelt.run(home / "recipe.yaml", out=home / "run", quiet=True)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    home = _home(tmp_path_factory.mktemp("classifier"), "text-classification", "[quantize, onnx]")
    return home, smelt.run(str(home / "recipe.yaml"), out=str(home / "run"), quiet=True)


def _command(*arguments):
    result = harness.smelt(*arguments, code=0)
    return result.output.splitlines()


@pytest.mark.parametrize("limit", [2.5, np.int64(0)])
def test_invalid_limit_is_rejected_before_writing(limit, translator, tmp_path):
    home, _ = translator
    with raises_code("wrong-value", smelt.InputError) as excinfo:
        smelt.run(home / "recipe.yaml", out=tmp_path / "run", limit=limit, quiet=True)
    assert excinfo.value.setting == "limit"
    assert repr(limit) in str(excinfo.value)
    assert not (tmp_path / "run").exists()


def test_report_exists_while_first_step_runs(translator, tmp_path, monkeypatch):
    """So that a run which is killed in a long training tells what was done."""
    home, _ = translator
    original, reports = StepRunner.run_step, []

    def looked_at(self, *args):
        reports.append(json.loads((tmp_path / "run" / "report.json").read_text()))
        return original(self, *args)

    monkeypatch.setattr(StepRunner, "run_step", looked_at)
    smelt.run(home / "recipe.yaml", out=tmp_path / "run", quiet=True)
    (report,) = reports
    assert (report["status"], report["verdict"]["reason"]) == ("interrupted", "not-finished")
    assert [step["status"] for step in report["steps"]] == ["done", "not-reached"]
    assert report["steps"][0]["quality"]


def test_single_sample_is_scored_and_packaged_without_interval(translator, tmp_path):
    home, _ = translator
    text = RECIPE.format(task="translation", stages="[quantize, onnx]")
    (home / "one.yaml").write_text(f"{text}gates: {{bleu: {{max_degradation: 50, confidence: 0.95}}}}\n")
    result = smelt.run(home / "one.yaml", out=tmp_path / "run", limit=1, quiet=True)
    assert result.exit_code == 3
    step = result.report["steps"][-1]
    assert step["quality"]["bleu"]["ci95"] is step["against_baseline"]["bleu"]["ci95"] is None
    assert step["against_baseline"]["bleu"]["p_value"] == 1.0
    assert step["gates"][0]["cause"] == "too-few-examples"
    summary = " ".join(summary_lines(result))
    assert "Package" not in summary  # random weights are no better than empty outputs
    assert step["gates"][0]["reason"] in " ".join(summary.split())
    package = smelt.package(tmp_path / "run" / "artifacts" / "onnx", out=tmp_path / "package")
    (line,) = [
        row_line
        for row_line in (package.folder / "README.md").read_text().splitlines()
        if "| BLEU" in row_line
    ]
    assert "[" not in line
    assert "None" not in line
    scored = "\n".join(
        _command("eval", tmp_path / "run" / "artifacts" / "onnx", "--data", home / "data.jsonl")
    )
    assert "n=8" in scored
    assert "[" in scored


def test_run_returns_report_of_its_folder(translator):
    home, result = translator
    assert result.exit_code == 0
    assert result.report == json.loads((home / "run" / "report.json").read_text())
    assert [s["status"] for s in result.report["steps"]] == ["done"] * 2
    assert result.artifact("quantize") == home / "run" / "artifacts" / "quantize"
    assert repr(result) == f"Result('recipe', 'passed', '{home / 'run'}')"
    with raises_code("no-artifact", smelt.InputError) as excinfo:
        result.artifact("quantze")
    assert all(name in str(excinfo.value) for name in ("'quantze'", "'quantize'?"))


def test_run_accepts_command_line_options(classifier, tmp_path):
    home, _ = classifier
    result = smelt.run(
        home / "recipe.yaml",
        overrides={"seed": 3, "score.quality": ["f1"]},
        until="quantize",
        out=tmp_path / "run",
        store=home / ".store",
        rebuild="quantize",
        limit=np.int64(4),
        quiet=True,
    )
    steps = {s["name"]: s for s in result.report["steps"]}
    assert list(steps) == ["model", "quantize"]
    assert {n: s["quality"]["f1"]["n"] for n, s in steps.items()} == {"model": 4, "quantize": 4}
    assert list(steps["model"]["quality"]) == ["f1"]
    assert result.report["recipe"]["seed"] == 3
    assert steps["quantize"]["status"] == "done"
    options = {"out": tmp_path / "r", "store": home / ".store"}
    second_result = smelt.run(home / "recipe.yaml", overrides=["seed=3"], until="quantize", **options)
    assert [s["status"] for s in second_result.report["steps"]] == ["cached", "cached"]
    anew = smelt.run(
        home / "recipe.yaml", rebuild=True, out=tmp_path / "r", store=home / ".store", quiet=True
    )
    assert [s["status"] for s in anew.report["steps"]] == ["done"] * 3


def test_failed_gate_is_result_and_error_is_raised(classifier, tmp_path):
    home, _ = classifier
    arguments = {"out": tmp_path / "run", "store": home / ".store", "quiet": True}
    result = smelt.run(home / "recipe.yaml", overrides={"gates": {"accuracy": {"min": 101}}}, **arguments)
    assert (result.exit_code, result.report["status"]) == (3, "gate-failed")
    with raises_code("unknown-setting", smelt.InputError) as excinfo:
        smelt.run(home / "recipe.yaml", overrides={"seeed": 1}, **arguments)
    assert "'seeed'" in str(excinfo.value)
    with raises_code("unreadable-file", smelt.InputError):
        smelt.run(home / "nowhere.yaml", **arguments)


@pytest.mark.parametrize("step", ["model", "quantize"])
def test_generate_equals_predict_command(translator, step):
    _, result = translator
    texts = tiny.SENTENCES[:3]
    with smelt.load(result.artifact(step), threads=1) as model:
        assert model.task == "translation"
        assert model.device == "cpu"
        assert model.config["model_type"] == "marian"
        outputs = model.generate(texts, max_new_tokens=6)
        assert model.generate([]) == []
    assert outputs == _command("predict", result.artifact(step), *texts, "--max-new-tokens", 6)


@pytest.mark.parametrize("step", ["model", "onnx"])
def test_predict_returns_labels_and_probabilities(classifier, step):
    _, result = classifier
    texts = tiny.SENTENCES[:3]
    with smelt.load(str(result.artifact(step))) as model:
        predictions = model.predict(texts)
        pair = model.predict([(texts[0], texts[1])])
        assert model.predict([]) == []
    assert len(predictions) == 3
    assert pair[0].probabilities != predictions[0].probabilities
    for prediction in predictions:
        assert set(prediction.probabilities) == {"LABEL_0", "LABEL_1"}
        assert sum(prediction.probabilities.values()) == pytest.approx(1)
        assert prediction.probabilities[prediction.label] == max(prediction.probabilities.values())
    lines = [f"{p.label}\t{p.probabilities[p.label]:.3f}" for p in predictions]
    assert lines == _command("predict", result.artifact(step), *texts)


def test_invalid_calls_are_explained(translator, classifier, tmp_path):
    with smelt.load(translator[1].artifact("model")) as model:
        with raises_code("does-not-fit-task", smelt.InputError) as excinfo:
            model.predict(["x"])
        assert all(value in str(excinfo.value) for value in ("translation", "generate"))
        with raises_code("unknown-setting", smelt.InputError) as excinfo:
            model.generate(["x"], max_new_token=3)
        assert excinfo.value.setting == "max_new_token"
        assert "'max_new_tokens'?" in str(excinfo.value)
        with raises_code("not-a-list", smelt.InputError):
            model.generate("x")
    with (
        smelt.load(classifier[1].artifact("onnx")) as model,
        raises_code("does-not-fit-task", smelt.InputError) as excinfo,
    ):
        model.generate(["x"])
    assert "predict" in str(excinfo.value)
    with raises_code("missing-folder", smelt.InputError):
        smelt.load(tmp_path / "nowhere")
    with raises_code("wrong-value", smelt.InputError) as excinfo:
        smelt.load(translator[1].artifact("model"), device="gpu")
    assert excinfo.value.setting == "device"


def test_importing_smelt_loads_no_heavy_packages():
    code = (
        "import smelt, sys; print(sorted({'pydantic', 'yaml', 'click', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
