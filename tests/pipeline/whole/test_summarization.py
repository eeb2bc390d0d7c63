"""The whole way of a summarizer through the command line: T5 v1.1 with a prefix from its config."""

import json

import pytest

from tests.support import harness
from tests.support.models import seq2seq, tiny

RECIPE = """
model: m
task: summarization
data:
  train: data.jsonl
  validation: data.jsonl
  test: data.jsonl
  columns: {source: dialogue, target: summary}
stages:
  - distill: {student: {decoder_layers: 1}, max_steps: 2, batch_size: 4, num_evals: 1, precision: fp32}
  - prune: {targets: [heads, ffn], keep_ratio: 0.5}
  - quantize: {}
  - onnx: {}
score:
  generation: {max_new_tokens: 6}
  latency: false
gates: {rouge1: {max_degradation: 100}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("t5")
    seq2seq.write_t5(home / "m", gated=True)
    config = json.loads((home / "m" / "config.json").read_text())
    config["task_specific_params"] = {"summarization": {"prefix": seq2seq.PREFIX, "max_length": 20}}
    (home / "m" / "config.json").write_text(json.dumps(config))
    rows = [{"dialogue": s, "summary": t} for s, t in zip(tiny.SENTENCES, tiny.SENTENCES[4:], strict=False)]
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "recipe.yaml").write_text(RECIPE)
    result = harness.smelt("run", home / "recipe.yaml", "--out", home / "run", "--quiet")
    assert result.exit_code == 0, result.output
    return home


def test_every_step_is_scored_by_rouge(home):
    steps = json.loads((home / "run" / "report.json").read_text())["steps"]
    assert [s["status"] for s in steps] == ["done"] * 5
    assert all(list(s["quality"]) == ["rouge1", "rouge2", "rougeL", "rougeLsum"] for s in steps)
    assert all(s["quality"]["rouge1"]["n"] == 6 for s in steps)
    assert steps[-1]["runner"] == "onnxruntime"
    assert steps[-1]["gates"][0]["passed"] is True
    sizes = [s["parameters"] for s in steps]
    assert sizes[0] > sizes[1] > sizes[2]
    # of the last torch step: with so few weights a graph's nodes weigh the most
    assert steps[-2]["size_bytes"] < steps[0]["size_bytes"]
    assert steps[0]["details"]["prefix"] == seq2seq.PREFIX


def test_plan_shows_prefix_and_its_origin(home):
    result = harness.smelt("plan", home / "recipe.yaml")
    assert f"prefix '{seq2seq.PREFIX}' (from the model" in result.output
    other = harness.smelt("plan", home / "recipe.yaml", "--set", 'data.prefix=""')
    assert "prefix '' (" in other.output


def test_predict_prepends_prefix(home):
    """The same words with the prefix written out, on a copy that has none, give the same."""
    from smelt.core.artifact import read_artifact
    from smelt.generation.config import GenerationSettings
    from smelt.models.checkpoint import write_text_rules
    from smelt.models.text_rules import TextRules
    from smelt.runtimes.predict_texts import generate_texts
    from smelt.runtimes.registry import open_runner

    folder = home / "run" / "artifacts" / "onnx"
    output = harness.smelt("predict", folder, tiny.SENTENCES[0]).output.strip()
    text = (folder / "text.json").read_text()
    assert json.loads(text) == {"prefix": seq2seq.PREFIX}
    with open_runner(read_artifact(folder), 1) as runner:
        try:
            write_text_rules(folder, TextRules())
            by_hand = generate_texts(
                runner, [seq2seq.PREFIX + tiny.SENTENCES[0]], GenerationSettings(max_new_tokens=6)
            )
        finally:
            (folder / "text.json").write_text(text)
    assert output == by_hand[0].strip()
    assert output


def test_latency_inputs_include_prefix(home):
    from smelt.evaluate.latency.worker import TimingWorker
    from smelt.models.checkpoint import load_tokenizer

    folder = home / "run" / "artifacts" / "onnx"
    worker, text = TimingWorker(), tiny.SENTENCES[0]
    request = {"op": "load", "artifact": str(folder), "threads": 1, "task": "summarization"}
    assert "onnxruntime" in worker.handle_request(request)["runner"]
    request = {"op": "prepare", "texts": [text], "pairs": None, "batch_size": 1, "limit_ms": 1}
    response = worker.handle_request({**request, "generation": {"max_new_tokens": 2}})
    assert response["input_tokens"] == len(load_tokenizer(folder)(seq2seq.PREFIX + text)["input_ids"])


def test_missing_columns_suggest_common_names(home):
    plain = RECIPE.replace("  columns: {source: dialogue, target: summary}\n", "")
    (home / "plain.yaml").write_text(plain)
    result = harness.smelt("plan", home / "plain.yaml")
    assert result.exit_code == 2
    assert "{source: dialogue, target: summary}" in result.output


def test_texts_without_summaries_are_scored_by_agreement(home):
    from sacrebleu.metrics.chrf import CHRF

    rows = "".join(json.dumps({"dialogue": text}) + "\n" for text in tiny.SENTENCES)
    (home / "unlabeled.jsonl").write_text(rows)
    artifacts = home / "run" / "artifacts"
    printed = [
        harness.smelt("predict", artifacts / name, *tiny.SENTENCES, "--max-new-tokens", 6).output.splitlines()
        for name in ("prune", "model")
    ]
    result = harness.smelt(
        *("eval", artifacts / "prune", "--data", home / "unlabeled.jsonl", "--metric", "agreement"),
        *("--baseline", artifacts / "model", "--column", "source=dialogue", "--max-new-tokens", 6, "--json"),
    )
    assert result.exit_code == 0, result.output
    scores = [100 if a == b else CHRF().sentence_score(a, [b]).score for a, b in zip(*printed, strict=True)]
    printed_json = result.output[result.output.index("{") :]  # after a warning
    assert json.loads(printed_json)["agreement"]["value"] == pytest.approx(sum(scores) / len(scores))
    assert min(scores) < 100
