"""A language model through the command line: plan, run, gates, eval, predict, and what is refused."""

import json
import re

import pytest

from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.models import causal
from tests.support.processes import forked_workers
from tests.support.standins import fake_workers

RECIPE = """
model: m
task: language-modeling
data: {train: t.txt, validation: t.txt, test: t.txt, windows: {length: 32, stride: 16}}
stages:
  - prune: {targets: [heads, ffn], keep_ratio: 0.5, calibration_samples: 8}
  - quantize: {scheme: int8-dynamic}
  - onnx: {target: ort-cpu}
score:
  latency:
    {batch_sizes: [2], rounds: 3, texts: 2, min_round_ms: 1, threads: 1, prompt_tokens: 6, new_tokens: 5,
     steps: all}
gates:
  perplexity: {max_degradation: 1e6, max: 1.5, at: [onnx]}
  bits_per_byte: {max_degradation: 0.0, at: [model]}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    causal.write_model(home / "m", "gpt2")
    causal.write_lines(home / "t.txt", 2)
    (home / "recipe.yaml").write_text(RECIPE)
    return home


@pytest.fixture(scope="module")
def report(home):
    with pytest.MonkeyPatch.context() as patch:
        fake_workers.ignore_disturbance(patch)
        forked_workers.install(patch)
        result = harness.smelt("run", home / "recipe.yaml", "--out", home / "run", "--quiet")
    assert result.exit_code == 3, result.output  # the gate of 1.5 cannot hold
    return json.loads((home / "run" / "report.json").read_text())


def test_few_windows_warn(report):
    [warning] = [entry["message"] for entry in report["warnings"] if entry["code"] == "few-windows"]
    assert re.search(r"\b\d\d windows", warning)


def test_report_has_perplexity_and_tokens_per_second(report):
    assert report["status"] == "gate-failed"
    for step in report["steps"]:
        score = step["quality"]["perplexity"]
        assert score["higher_is_better"] is False
        assert score["ci95"][0] <= score["value"] <= score["ci95"][1]
        assert score["n"] > 300
        (row,) = step["latency"]
        assert (row["unit"], row["output_tokens"]) == ("tokens/s", 5.0)
        assert 5 <= row["input_tokens"] <= 6
        # each call gives 2 prompts 5 tokens
        assert row["throughput"] == pytest.approx(2 * 5 * 1000 / row["p50_ms"], rel=0.9)
    quantized, onnx = report["steps"][-2:]
    assert onnx["quality"]["perplexity"]["value"] == pytest.approx(
        quantized["quality"]["perplexity"]["value"], rel=1e-2
    )


def test_plan_shows_max_degradation_of_perplexity_as_rise(home):
    output = harness.smelt("plan", home / "recipe.yaml").output
    assert "perplexity: rise at most 1,000,000 at onnx" in output
    assert "perplexity, bits_per_byte" in output


def test_gate_limits_rise_if_lower_is_better(report):
    gates = {(g["metric"], g["kind"]): g for g in report["steps"][-1]["gates"]}
    rise = report["steps"][-1]["against_baseline"]["perplexity"]["difference"]
    assert gates["perplexity", "max_degradation"]["value"] == rise
    assert gates["perplexity", "max_degradation"]["passed"]
    assert not gates["perplexity", "max"]["passed"]
    assert report["steps"][0]["gates"][0]["passed"]  # the baseline has not risen against itself


def test_random_weights_are_not_pareto_optimal(report):
    for step in report["steps"]:
        score = step["quality"]["perplexity"]
        assert score["ci95"][1] >= score["chance"]  # the number of tokens, as of a uniform model
    assert report["pareto_front"] == []


def test_pages_show_lower_is_better(home, report):
    page = (home / "run" / "report.html").read_text()
    assert "Perplexity (lower is better)" in page
    assert "tokens/s" in page
    text = (home / "run" / "report.md").read_text()
    bits = report["steps"][1]["quality"]["bits_per_byte"]["value"]
    assert f"{bits:.4f}" in text


def test_eval_and_predict_work_on_every_format(home, report):
    for name in ("prune", "onnx"):
        folder = home / "run" / "artifacts" / name
        result = harness.smelt("eval", folder, "--data", home / "t.txt", "--metric", "perplexity", "--json")
        assert json.loads(result.stdout)["perplexity"]["n"] > 300
        result = harness.smelt("predict", folder, "The old house", "A man in a", "--max-new-tokens", 4)
        lines = result.output.splitlines()
        assert result.exit_code == 0
        assert lines[0].startswith("The old house")


def test_eval_uses_windows_of_run_by_default(home, report):
    for step in report["steps"]:
        folder = home / "run" / step["artifact"]
        result = harness.smelt("eval", folder, "--data", home / "t.txt", "--json")
        assert "window 32, stride 16" in result.stderr
        assert json.loads(result.stdout) == step["quality"]
    other = harness.smelt("eval", folder, "--data", home / "t.txt", "--window", 8)
    assert "window 32" not in other.output
    assert "window:8|stride:8" in other.output
    partial = harness.smelt("eval", folder, "--data", home / "t.txt", "--stride", 4)
    assert "window 32\n" in partial.stderr
    assert "window:32|stride:4" in partial.output


def test_artifact_key_depends_on_windows(home, report, tmp_path):
    """Or the second run would find the windows of the first in what it takes from the store."""
    options = ["--until", "model", "--set", "data.windows={length: 16}", "--set", "score.latency=false"]
    result = harness.smelt(
        "run", home / "recipe.yaml", "--out", tmp_path / "r", "--store", home / ".store", *options
    )
    assert result.exit_code == 0, result.output
    eval_result = harness.smelt("eval", tmp_path / "r" / "artifacts" / "model", "--data", home / "t.txt")
    assert "window:16|stride:16" in eval_result.output


def test_eval_window_options_change_windows(home, report):
    def score(*options):
        result = harness.smelt("eval", folder, *rows, "--metric", "perplexity", "--json", *options)
        return json.loads(result.stdout)["perplexity"]

    folder, rows = home / "run" / "artifacts" / "prune", ("--data", home / "t.txt")
    disjoint, sliding = score("--window", 16), score("--window", 16, "--stride", 4)
    assert disjoint["n"] == sliding["n"]
    assert disjoint["value"] != sliding["value"]
    assert disjoint["signature"] != sliding["signature"]
    result = harness.smelt("eval", folder, *rows, "--window", 4, "--stride", 5)
    assert result.exit_code == 2
    assert command_error(result).code == "settings-conflict"
    assert all(value in str(command_error(result)) for value in ("--stride 5", "4 tokens"))


@pytest.mark.parametrize(("change", "code", "setting", "named"), [
    ({"windows": "length: 100"}, "window-too-long", "data.windows.length", ("100", "64")),
    ({"windows": "length: 8, stride: 9"}, "settings-conflict", "data.windows", ("9", "8")),
    ({"task": "translation"}, "unsupported-task", "model", ("gpt2", "language-modeling")),
    ({"limit": "min: 3"}, "does-not-fit-metric", "gates.perplexity.min", ("max_degradation or max",)),
    ({"metric": "bleu"}, "does-not-fit-task", "score.quality[0]", ("'bleu'",)),
])  # fmt: skip
def test_recipe_not_matching_task_is_rejected(home, change, code, setting, named):
    text = RECIPE.replace("length: 32, stride: 16", change.get("windows", "length: 32"))
    text = text.replace("language-modeling", change.get("task", "language-modeling"))
    text = text.replace("max: 1.5", change.get("limit", "max: 1.5"))
    if "metric" in change:
        text = text.replace("score:", f"score:\n  quality: [{change['metric']}]").split("gates:")[0]
    path = home / "bad.yaml"
    path.write_text(text)
    error = command_error(harness.smelt("plan", path, code=2))
    messages = [message for message in error.messages if (message.code, message.setting) == (code, setting)]
    assert len(messages) == 1, str(error)
    assert [value for value in named if value not in messages[0].message] == []


def test_unsupported_model_config_is_rejected(home, tmp_path):
    causal.write_model(tmp_path / "m", "llama", num_hidden_layers=1)
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "rope_parameters": {"rope_type": "yarn"},
        "use_sliding_window": True,
        "architectures": ["LlamaModel"],
    }
    path.write_text(json.dumps(config))
    causal.write_lines(tmp_path / "t.txt", 1)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    error = command_error(harness.smelt("plan", tmp_path / "recipe.yaml", code=2))
    assert {message.code for message in error.messages} >= {"unsupported-config", "unsupported-architecture"}
    assert "'yarn'" in str(error)
