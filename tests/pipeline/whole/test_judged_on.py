"""Where branches compete, validation judges and chooses, and what was chosen is scored on test."""

import json

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import smelt
from smelt.core.errors import RunError
from smelt.evaluate.report import step_schema
from smelt.evaluate.report.render import render_table
from smelt.evaluate.report.schema import validate_report
from smelt.pipeline.execute import run
from tests.support import harness
from tests.support.models import tiny
from tests.support.standins.sample_report import make_message

RECIPE = """
model: m
task: translation
data: {{validation: validation.jsonl, test: test.jsonl}}
stages:
  - onnx: {{}}
    name: whole
  - quantize: {{scheme: int8-dynamic}}
    from: model
  - onnx: {{}}
    name: small
gates: {{on: {on}, chrf: {{min: 30}}}}
score: {{quality: [chrf], generation: {{max_new_tokens: 6}}, latency: false}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model that says of validation what is expected there, and nothing of the kind on test."""
    folder = tmp_path_factory.mktemp("home")
    tiny.write_marian(folder / "m", encoder_ffn_dim=256, decoder_ffn_dim=256)  # so that int8 makes it smaller
    tiny.write_pairs(folder / "test.jsonl", 8)
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(folder / "m"),
        AutoTokenizer.from_pretrained(folder / "m"),
    )
    batch = tokenizer([row["source"] for row in rows], return_tensors="pt", padding=True)
    outputs = tokenizer.batch_decode(model.generate(**batch, max_new_tokens=6), skip_special_tokens=True)
    assert all(outputs)
    rewritten = [{"source": row["source"], "target": text} for row, text in zip(rows, outputs, strict=True)]
    (folder / "validation.jsonl").write_text("\n".join(map(json.dumps, rewritten[:6])))
    for on in ("validation", "test"):
        (folder / f"{on}.yaml").write_text(RECIPE.format(on=on))
    return folder


def _report(home, on, out, code, monkeypatch):
    # random models are no better than none
    monkeypatch.setattr(step_schema, "is_chance_level", lambda *_: False)
    result = harness.smelt("run", home / f"{on}.yaml", "--quiet", "--out", out, "--store", home / "s")
    assert result.exit_code == code, result.output
    report = json.loads((out / "report.json").read_text())
    return report, {step["name"]: step for step in report["steps"]}


def test_validation_judges_gates_and_selected_step_is_scored_on_test(home, tmp_path, monkeypatch):
    report, steps = _report(home, "validation", tmp_path / "v", 3, monkeypatch)  # of test
    assert report["judged_on"] == "validation"
    assert {step["quality"]["chrf"]["n"] for step in steps.values()} == {6}
    assert steps["whole"]["quality"]["chrf"]["value"] > 90
    assert steps["whole"]["gates"][0]["passed"]
    tested = {name: step["test"] for name, step in steps.items() if step["test"]}
    # the baseline, the smallest of what keeps its gates, and the step that it comes from
    assert set(tested) == {"model", "small", "quantize"}
    scored = harness.smelt("eval", tmp_path / "v/artifacts/small", "--data", home / "test.jsonl", "--json",
                           "--metric", "chrf", "--max-new-tokens", "6")  # fmt: skip
    assert tested["small"]["quality"]["chrf"]["n"] == 8
    assert tested["small"]["quality"]["chrf"]["value"] == json.loads(scored.stdout)["chrf"]["value"]
    difference = tested["small"]["against_baseline"]["chrf"]["difference"]
    values = [tested[name]["quality"]["chrf"]["value"] for name in ("small", "model")]
    assert difference == pytest.approx(values[0] - values[1])
    assert [gate["passed"] for gate in tested["small"]["gates"]] == [False]
    verdict = report["verdict"]
    assert (verdict["step"], verdict["reason"], verdict["closest"]) == (None, "gates-failed", "small")
    assert verdict["difference"]["difference"] == difference
    text = " ".join(render_table(report).split())
    assert verdict["text"] in text
    assert f"'small': gate failed: chrF {values[0]:.2f} (at least 30.00)" in text
    assert f"quality {values[1]:.2f} → {values[0]:.2f} chrF" in text
    assert f"'model' on test: chrF {values[1]:.2f}" in text
    assert "On test" in (tmp_path / "v/report.md").read_text()
    assert validate_report(report).judged_on == "validation"


def test_gate_judged_on_test_fails(home, tmp_path, monkeypatch):
    report, steps = _report(home, "test", tmp_path / "t", 3, monkeypatch)
    assert report["judged_on"] == "test"
    assert {step["quality"]["chrf"]["n"] for step in steps.values()} == {8}
    assert [step["test"] for step in steps.values()] == [None] * 4
    assert steps["whole"]["gates"][0]["passed"] is False


def test_package_readme_has_test_score_of_selected_step(home, tmp_path, monkeypatch):
    _, steps = _report(home, "validation", tmp_path / "v", 3, monkeypatch)
    for name, split in (("small", "test"), ("whole", "validation")):
        out = tmp_path / name
        package = smelt.package(tmp_path / "v/artifacts" / name, out=out)
        text = (out / "README.md").read_text()
        score = (steps[name]["test"] or steps[name])["quality"]["chrf"]
        assert f"{score['value']:.2f}" in text
        assert ("among which this step was chosen" in text) == (split == "validation")
        codes = [warning.code for warning in package.warnings]
        assert ("gate-not-kept-on-test" in codes) == (split == "test")  # only small was scored on test


def test_package_of_step_with_failed_gate_warns(home, tmp_path, monkeypatch):
    _report(home, "test", tmp_path / "t", 3, monkeypatch)
    output = harness.smelt("package", tmp_path / "t/artifacts/whole", "--out", tmp_path / "p")
    assert "gate chrF at least 30.00 is failed" in output.output
    assert "gate chrF at least 30.00 is failed" in (tmp_path / "p/README.md").read_text().replace("\\", "")
    trial = harness.smelt(
        "run",
        home / "validation.yaml",
        "--quiet",
        "--limit",
        "4",
        "--out",
        tmp_path / "l",
        "--store",
        home / "s",
    )
    assert trial.exit_code == 3, trial.output  # of test
    output = harness.smelt("package", tmp_path / "l/artifacts/whole", "--out", tmp_path / "q")
    assert "A trial on 4 samples" in output.output


def test_failed_test_score_is_reported_on_its_step(home, tmp_path, monkeypatch):
    """The others keep what they have, and the report says that not all is there."""
    original_score = run._PlanRunner._score

    def failing(self, name, artifact, on_test=False):
        if on_test and name == "small":
            raise RunError("no score today", code="made-up")
        return original_score(self, name, artifact, on_test)

    monkeypatch.setattr(run._PlanRunner, "_score", failing)
    report, steps = _report(home, "validation", tmp_path / "v", 1, monkeypatch)
    assert report["status"] == "error"
    assert steps["small"]["error"]["code"] == "made-up"
    assert steps["small"]["error"]["message"] == "on test: no score today"
    assert (steps["small"]["test"], steps["small"]["status"] in ("done", "cached")) == (None, True)
    assert steps["model"]["test"] is not None
    assert [step["error"] for name, step in steps.items() if name != "small"] == [None] * 3


def test_warnings_of_test_score_are_warnings_of_step(home, tmp_path, monkeypatch):
    original_score = run._PlanRunner._score

    def score_with_warning(self, name, artifact, on_test=False):
        result = original_score(self, name, artifact, on_test)
        return result | {"warnings": [make_message("one was cut")]} if on_test else result

    monkeypatch.setattr(run._PlanRunner, "_score", score_with_warning)
    _, steps = _report(home, "validation", tmp_path / "v", 3, monkeypatch)
    assert make_message("on test: one was cut") in steps["small"]["warnings"]
