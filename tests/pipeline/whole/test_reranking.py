"""A cross-encoder from queries with passages: scored by query in every step, and its scores of pairs."""

import json

import pytest

import smelt
from tests.support import harness
from tests.support.models import classifiers, tiny

RECIPE = """
model: m
task: text-classification
data:
  train: queries.jsonl
  validation: queries.jsonl
  test: queries.jsonl
  columns: {text: query, text_pair: passage}
stages:
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 1, metric_for_best_model: loss}
  - quantize: {scheme: int8-dynamic}
  - onnx: {target: ort-cpu}
score: {latency: false, quality: [mrr, ndcg: {k: 3}]}
gates: {mrr: {min: 1, at: onnx}}
"""


@pytest.mark.parametrize("outputs", [1, 2])
def test_reranker_is_scored_by_query_from_training_to_graph(outputs, tmp_path):
    folder = classifiers.MAKERS["roberta"](tmp_path / "m", labels=outputs)
    texts = tiny.SENTENCES
    rows = [
        {"query": text, "positive": [texts[i - 1]], "negative": [texts[i - 2], texts[i - 3], texts[i - 4]]}
        for i, text in enumerate(texts[:5])
    ]
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    result = smelt.run(tmp_path / "recipe.yaml", out=tmp_path / "run", quiet=True)
    assert result.exit_code == 0, result.report
    steps = result.report["steps"]
    assert [step["status"] for step in steps] == ["done"] * 4
    for step in steps:
        assert {name: score["n"] for name, score in step["quality"].items()} == {"mrr": 5, "ndcg": 5}
    pair = f"{texts[0]}\t{texts[1]}"
    answer = harness.smelt("predict", tmp_path / "run" / steps[-1]["artifact"], pair)
    assert answer.exit_code == 0, answer.output
    value = answer.output.strip().splitlines()[-1].split("\t")
    assert len(value) == outputs  # a number; a class and its probability
    assert isinstance(float(value[-1]), float)
    assert folder.is_dir()
