"""Sentence embeddings through the command line: init, plan, run, eval, predict, bench; what is refused."""

import json
import math

import numpy as np
import pytest

import smelt
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.models import embedders, tiny
from tests.support.processes import forked_workers

CHAIN = """
model: m
task: sentence-similarity
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - distill: {student: {layers: 1}, max_steps: 2, batch_size: 4, num_evals: 1}
  - prune: {targets: [heads, ffn], keep_ratio: 0.5, calibration_samples: 8}
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 1, metric_for_best_model: spearman}
  - quantize: {}
  - onnx: {}
score: {latency: false}
"""
SHORT = """
model: m
task: sentence-similarity
data: {train: data.jsonl, test: data.jsonl}
stages:
  - quantize: {}
  - onnx: {}
score: {latency: false}
"""


def words(result):
    return " ".join(result.output.split())


def home(folder, recipe=CHAIN, scores=True, paired=True, **options):
    embedders.write_embedder(folder / "m", **options)
    embedders.write_rows(folder / "data.jsonl", scores=scores, paired=paired)
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def steps_of(folder):
    report = json.loads((folder / "run" / "report.json").read_text())
    return {step["name"]: step for step in report["steps"]}


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    folder = home(tmp_path_factory.mktemp("chain"), max_length=12)
    result = harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet")
    assert result.exit_code == 0, result.output
    return folder


def test_every_step_is_compared_with_baseline(chain):
    steps = steps_of(chain)
    assert [s["status"] for s in steps.values()] == ["done"] * 6
    for step in steps.values():
        assert list(step["quality"]) == ["spearman", "pearson", "agreement"]
        assert step["quality"]["spearman"]["n"] == 8
        assert step["quality"]["agreement"]["n"] == 16
    assert steps["model"]["quality"]["agreement"]["value"] == pytest.approx(100)
    assert steps["quantize"]["quality"]["agreement"]["value"] < 99.99
    for other in ("against_baseline", "against_parent"):
        assert set(steps["onnx"][other]) == {"spearman", "pearson", "agreement"}
        extra_keys = {"p_value_holm"} if other == "against_baseline" else set()
        assert set(steps["onnx"][other]["agreement"]) == {"difference", "ci95", "p_value", "n"} | extra_keys


def test_eval_equals_report_scores(chain):
    artifacts = chain / "run" / "artifacts"
    arguments = ("--data", chain / "data.jsonl", "--json")
    result = harness.smelt("eval", artifacts / "onnx", *arguments, "--baseline", artifacts / "model")
    assert json.loads(result.stdout) == steps_of(chain)["onnx"]["quality"]
    scores = json.loads(harness.smelt("eval", artifacts / "onnx", *arguments).stdout)
    assert list(scores) == ["spearman", "pearson"]
    for metric, code, fragment in (
        ("agreement", "missing-data", "--baseline ARTIFACT"),
        ("accuracy", "unknown-metric", "accuracy"),
    ):
        error = command_error(
            harness.smelt("eval", artifacts / "onnx", *arguments, "--metric", metric, code=2)
        )
        assert (error.code, fragment in str(error)) == (code, True)


def test_load_embeds_texts_in_order(chain):
    texts = [*tiny.SENTENCES, " ".join(tiny.SENTENCES * 2)]
    with smelt.load(chain / "run" / "artifacts" / "model") as model:
        with pytest.warns(smelt.TruncationWarning) as warned:
            vectors = model.embed(texts, batch_size=2)
        assert [warning.message.count for warning in warned] == [1]
        assert f"1 of {len(texts)} texts" in str(warned[0].message)
        assert (vectors.dtype, vectors.shape) == (np.float32, (len(texts), 32))
        assert model.embed([]).shape == (0, 32)
        expected = embedders.expected_vectors(chain / "run" / "artifacts" / "model", texts)
        assert np.abs(vectors - expected).max() < 2e-6
        with raises_code("does-not-fit-task", smelt.InputError):
            model.generate(texts)
        with raises_code("does-not-fit-task", smelt.InputError):
            model.predict(texts)
        with raises_code("pairs-not-taken", smelt.InputError) as excinfo:
            model.embed([("a", "b")])
        assert excinfo.value.setting == "texts[0]"


def test_predict_prints_vector_of_text_and_cosine_of_pair(chain):
    artifact = chain / "run" / "artifacts" / "model"
    first, second = "a man walks", "she sings a song"
    a, b = embedders.expected_vectors(artifact, [first, second])
    lines = harness.smelt("predict", artifact, first, f"{first}\t{second}").output.splitlines()
    assert np.abs(np.array(json.loads(lines[0])) - a).max() < 2e-6
    assert float(lines[1]) == pytest.approx(a @ b, abs=1e-4)
    output = harness.smelt("predict", artifact, "--json", first, f"{first}\t{second}")
    records = [json.loads(line) for line in output.output.splitlines()]
    assert list(records[0]) == ["text", "embedding"]
    assert list(records[1]) == ["text", "text_pair", "similarity"]
    assert records[1]["similarity"] == pytest.approx(a @ b, abs=1e-6)
    rows = harness.smelt("predict", artifact, "--data", chain / "data.jsonl").output.splitlines()
    assert len(rows) == 8
    assert all(-1 <= float(row) <= 1 for row in rows)


def test_bench_measures_from_text_to_vector(chain, monkeypatch):
    forked_workers.install(monkeypatch)
    artifacts = chain / "run" / "artifacts"
    bench_result = harness.smelt(
        "bench", artifacts / "onnx", "--json", "--batch-size", "2", "--texts", "4", "--rounds", "3"
    )
    assert bench_result.exit_code == 0, bench_result.output
    result = json.loads(bench_result.stdout)
    for artifact in result["artifacts"].values():
        assert artifact["error"] is None
        [row] = artifact["latency"]
        assert (row["unit"], row["output_tokens"]) == ("texts/s", None)
        assert set(row["parts"]) == {"tokenizing_ms", "model_ms", "rest_ms"}


@pytest.mark.parametrize("paired", [True, False])
def test_run_without_scores_reports_agreement_only(paired, tmp_path):
    folder = home(tmp_path, SHORT.replace("  - onnx: {}\n", ""), scores=False, paired=paired)
    result = harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet")
    assert result.exit_code == 0, result.output
    for step in steps_of(folder).values():
        assert list(step["quality"]) == ["agreement"]
        assert step["quality"]["agreement"]["n"] == 16 if paired else 8


def test_steps_before_baseline_are_compared_with_it(tmp_path):
    recipe = CHAIN.split("  - prune", maxsplit=1)[0] + "score: {latency: false}\nbaseline: distill\n"
    folder = home(tmp_path, recipe, scores=False)
    assert harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet").exit_code == 0
    steps = steps_of(folder)
    assert steps["distill"]["quality"]["agreement"]["value"] == pytest.approx(100)
    model = steps["model"]["quality"]["agreement"]
    assert model["value"] < 99.99
    vectors = {}
    for name in ("model", "distill"):
        with smelt.load(folder / "run" / "artifacts" / name) as loaded:
            rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
            vectors[name] = loaded.embed([r["text"] for r in rows] + [r["text_pair"] for r in rows]).astype(
                float
            )
    expected = 100 * np.mean(np.sum(vectors["model"] * vectors["distill"], axis=1))
    assert model["value"] == pytest.approx(expected, abs=1e-3)
    assert steps["model"]["against_baseline"]["agreement"]["difference"] == pytest.approx(
        expected - 100, abs=1e-3
    )


def test_plain_encoder_uses_pooling_of_recipe(tmp_path):
    recipe = SHORT + "embedding: {pooling: cls, normalize: false, max_length: 9}\n"
    folder = home(tmp_path, recipe, rules=False)
    plan = harness.smelt("plan", folder / "recipe.yaml")
    assert "vectors the first token, not normalized, texts of at most 9 tokens" in words(plan)
    assert "has no modules.json" not in words(plan)
    assert harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet").exit_code == 0
    with smelt.load(folder / "run" / "artifacts" / "onnx") as model, pytest.warns(smelt.TruncationWarning):
        vectors = model.embed(["a man " * 20])
    artifact = folder / "run" / "artifacts" / "model"
    expected = embedders.expected_vectors(artifact, ["a man " * 20], "cls", normalize=False)
    assert math.isclose(float(np.linalg.norm(vectors)), float(np.linalg.norm(expected)), rel_tol=0.1)
    with smelt.load(artifact) as model, pytest.warns(smelt.TruncationWarning):
        assert np.abs(model.embed(["a man " * 20]) - expected).max() < 1e-4


def test_plain_encoder_defaults_to_mean_pooling_with_warning(tmp_path):
    folder = home(tmp_path, SHORT, rules=False)
    [warning] = [
        message for message in load_plan(folder / "recipe.yaml").warnings if message.code == "pooling-assumed"
    ]
    assert warning.setting == "embedding.pooling"
    assert all(value in warning.message for value in ("mean", "mean, cls, max."))
    assert warning.message in words(harness.smelt("plan", folder / "recipe.yaml"))


def test_init_recipe_runs(tmp_path):
    folder = home(tmp_path, SHORT)
    embedders.write_rows(folder / "train.jsonl", count=40, scores=False)
    result = harness.smelt(
        "init", folder / "m", "--data", folder / "train.jsonl", "--out", folder / "made.yaml"
    )
    assert result.exit_code == 0, result.output
    text = (folder / "made.yaml").read_text()
    assert "task: sentence-similarity" in text
    assert "losses: {sentence_embedding: 1.0, pairwise_similarity: 1.0}" in text
    done = harness.smelt(
        "run", folder / "made.yaml", "--out", folder / "run", "--quiet", "--limit", "8",
        "--set", "score.latency=false", "--set", "small.max_steps=2",
    )  # fmt: skip
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("change", "code", "setting", "named"), [
    ({"recipe": SHORT + "embedding: {pooling: middle}\n"}, "wrong-value", "embedding.pooling", ("'middle'",)),
    ({"recipe": SHORT.replace("sentence-similarity", "text-classification") + "embedding: {pooling: cls}\n"},
     "does-not-fit-task", "embedding", ("text-classification",)),
    ({"recipe": SHORT.replace("latency: false", "latency: false, quality: [spearman]"), "scores": False},
     "missing-scores", "score.quality[0]", ("'spearman'", "'label'", "agreement")),
    ({"recipe": SHORT + "gates: {pearson: {min: 50}}\n", "scores": False}, "missing-scores", "gates.pearson",
     ("'pearson'",)),
    ({"recipe": CHAIN, "scores": False}, "missing-scores", "stages[2].finetune", ("data.jsonl",)),
    ({"recipe": CHAIN, "scores": False}, "missing-scores", "stages[1].prune.importance", ("data.jsonl",)),
    ({"recipe": CHAIN.replace("max_steps: 2,", "max_steps: 2, losses: {logits: 1.0},", 1)}, "unknown-loss",
     "stages[0].distill.losses.logits",
     ("cosent", "hidden_states", "pairwise_similarity", "sentence_embedding")),
    ({"recipe": CHAIN.replace("metric_for_best_model: spearman", "metric_for_best_model: agreement")},
     "metric-not-scored", "stages[2].finetune.metric_for_best_model", ("'agreement'",)),
    ({"recipe": SHORT.replace("jsonl}", "jsonl, prefix: 'q: ', source_language: de}")}, "does-not-fit-task",
     "data", ("source_language",)),
])  # fmt: skip
def test_errors_are_reported_by_plan(change, code, setting, named, tmp_path):
    folder = home(tmp_path, **change)
    error = command_error(harness.smelt("plan", folder / "recipe.yaml", code=2))
    messages = [message for message in error.messages if (message.code, message.setting) == (code, setting)]
    assert len(messages) == 1, [(message.code, message.setting) for message in error.messages]
    assert [value for value in named if value not in messages[0].message] == []


def test_classifier_is_rejected_as_embedder(tmp_path):
    folder = home(tmp_path, SHORT)
    tiny.write_bert(folder / "m")
    error = command_error(harness.smelt("plan", folder / "recipe.yaml", code=2))
    assert error.code == "unsupported-architecture"
    assert "['BertForSequenceClassification']" in str(error)


def test_mixed_row_kinds_are_rejected(tmp_path):
    folder = home(tmp_path, SHORT)
    rows = (folder / "data.jsonl").read_text()
    for line, code, fragments in (
        ('{"text": "a"}', "partly-missing-column", ("row 1 ", "'text_pair'", "row 9 ")),
        ('{"text": "a", "text_pair": "b"}', "partly-missing-column", ("row 1 ", "'label'", "row 9 ")),
        ('{"text": "a", "label": 1}', "missing-column", ("data.jsonl:9: ", "'label'")),
        ('{"text": "a", "text_pair": "b", "label": "x"}', "wrong-column-type", ("data.jsonl:9: ", "'label'")),
    ):
        (folder / "data.jsonl").write_text(f"{rows}{line}\n")
        error = command_error(harness.smelt("plan", folder / "recipe.yaml", code=2))
        assert error.code == code
        assert [value for value in fragments if value not in str(error)] == []


def test_default_prompt_of_model_must_be_in_recipe(tmp_path):
    folder = home(tmp_path, SHORT)
    options = {"prompts": {"q": "a red "}, "default_prompt_name": "q"}
    (folder / "m" / "config_sentence_transformers.json").write_text(json.dumps(options))
    error = command_error(harness.smelt("plan", folder / "recipe.yaml", code=2))
    assert (error.code, "'a red '" in str(error)) == ("missing-prompt", True)
    recipe = SHORT.replace("test: data.jsonl", 'test: data.jsonl, prefix: "a red "')
    (folder / "recipe.yaml").write_text(recipe)
    assert harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet").exit_code == 0
    artifact = folder / "run" / "artifacts" / "model"
    with smelt.load(artifact) as model:
        assert np.abs(model.embed(["man"]) - embedders.expected_vectors(artifact, ["a red man"])).max() < 2e-6


def test_texts_are_lowercased_if_model_requires_it(tmp_path):
    """RoBERTa's tokenizer distinguishes capitals."""
    folder = home(tmp_path, SHORT, family="roberta", lower=True)
    assert harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet").exit_code == 0
    for name in ("model", "onnx"):
        with smelt.load(folder / "run" / "artifacts" / name) as model:
            vectors = model.embed(["A MAN", "a man"], batch_size=1)
            assert np.array_equal(vectors[0], vectors[1])


def test_agreement_with_excluded_baseline_is_not_judged_and_scores_are_kept(tmp_path):
    recipe = SHORT.replace("  - onnx: {}", "  - onnx: {}\n    name: whole\n    from: model")
    recipe += "baseline: quantize\ngates: {agreement: {min: 10, at: [whole, quantize]}}\n"
    folder = home(tmp_path, recipe)
    command = ("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet")
    partial = harness.smelt(*command, "--until", "whole")
    assert partial.exit_code == 0, partial.output
    assert [step["gates"] for step in steps_of(folder).values()] == [[], []]
    assert harness.smelt(*command).exit_code == 0
    quality = steps_of(folder)["quantize"]["quality"]
    assert harness.smelt(*command, "--until", "whole").exit_code == 0
    assert steps_of(folder)["quantize"]["quality"] == quality
    assert "agreement" in quality
