"""Classifiers through the command line: every problem type, pairs, label names, and what is refused."""

import gzip
import json

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from smelt.evaluate.metrics.ranking import RankedSamples
from smelt.evaluate.metrics.registry import DEFAULTS_BY_PROBLEM, METRICS_BY_PROBLEM, metrics_of
from tests.support import harness
from tests.support.expected_errors import command_error, error_codes
from tests.support.models import classifiers, tiny

CHAIN = """
model: m
task: text-classification
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - distill: {student: {layers: 1}, max_steps: 2, batch_size: 4, num_evals: 1}
  - prune: {targets: [heads, ffn], keep_ratio: 0.5, calibration_samples: 8}
  - quantize: {}
  - onnx: {}
score: {latency: false}
"""
SHORT = """
model: m
task: text-classification
data: {test: data.jsonl}
stages:
  - quantize: {}
score: {latency: false}
"""


OWN = """
def same(predictions, references, sources):
    assert all(isinstance(text, str) for pair in sources for text in pair), sources
    return [100.0 * (guess == label) for guess, label in zip(predictions, references)]
"""


def home(folder, family, problem, recipe=CHAIN, pairs=True, **config):
    names = {} if problem == REGRESSION else {"id2label": dict(enumerate(classifiers.CLASS_NAMES))}
    outputs = {"labels": 1 if problem == REGRESSION else 3}
    classifiers.MAKERS[family](folder / "m", **(outputs | names | config))
    classifiers.write_labeled_rows(folder / "data.jsonl", problem, pairs=pairs)
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def run(folder, *arguments):
    return harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet", *arguments)


def steps_of(folder):
    report = json.loads((folder / "run" / "report.json").read_text())
    return {step["name"]: step for step in report["steps"]}


@pytest.fixture(
    scope="module",
    params=[("roberta", SINGLE_LABEL), ("distilbert", MULTI_LABEL), ("bert", REGRESSION)],
    ids="-".join,
)
def chain(request, tmp_path_factory):
    """A finished run of all stages on pairs of texts."""
    family, problem = request.param
    every = ", ".join([*METRICS_BY_PROBLEM[problem], "own_classes:same"])
    every = every.replace("recall,", "{recall: {label: glad}},")
    chain = CHAIN.replace("latency: false", f"latency: false, quality: [{every}]")
    folder = home(tmp_path_factory.mktemp(family), family, problem, chain)
    (folder / "own_classes.py").write_text(OWN)
    result = run(folder)
    assert result.exit_code == 0, result.output
    return folder, problem


def test_classifier_pipeline_reports_metrics_of_problem_type(chain):
    folder, problem = chain
    steps = steps_of(folder)
    assert [s["status"] for s in steps.values()] == ["done"] * 5
    for step in steps.values():
        assert tuple(step["quality"]) == (*METRICS_BY_PROBLEM[problem], "own_classes:same")
        if problem != REGRESSION:
            metric = "accuracy" if problem == SINGLE_LABEL else "subset_accuracy"
            assert step["quality"]["own_classes:same"]["value"] == step["quality"][metric]["value"]
        counts = {name: score["n"] for name, score in step["quality"].items()}
        by_query = metrics_of(RankedSamples)
        assert {n for name, n in counts.items() if name not in by_query} == {8}
        assert all(0 < n <= 8 for name, n in counts.items() if name in by_query)
    assert steps["onnx"]["against_baseline"].keys() == {*METRICS_BY_PROBLEM[problem], "own_classes:same"}
    assert [m for m, s in steps["onnx"]["quality"].items() if not s["higher_is_better"]] == (
        ["mse" if problem == REGRESSION else "cross_entropy", "loss"]
    )
    config = json.loads((folder / "run" / "artifacts" / "onnx" / "config.json").read_text())
    # where the model did not say what it is, the data did, and the artifacts say it from then on
    assert config.get("problem_type") in ((problem,) if problem != SINGLE_LABEL else (SINGLE_LABEL, None))


def test_report_has_scores_of_each_class(chain):
    folder, problem = chain
    for step in steps_of(folder).values():
        classes = step["classes"]
        if problem == REGRESSION:
            assert classes is None
            continue
        if problem == MULTI_LABEL:
            mean = sum(class_scores["f1"] for class_scores in classes) / len(classes)
            assert step["quality"]["f1_macro"]["value"] == pytest.approx(mean)
            continue
        assert sum(class_scores["n"] for class_scores in classes) == 8
        hits = sum(class_scores["correct"] for class_scores in classes)
        assert step["quality"]["accuracy"]["value"] == 100 * hits / 8
        glad_scores = next(class_scores for class_scores in classes if class_scores["label"] == "glad")
        assert step["quality"]["recall"]["value"] == pytest.approx(glad_scores["recall"])


def test_int8_graph_equals_torch_on_unseen_texts(chain):
    import numpy as np
    import onnxruntime

    from smelt.core.artifact import read_artifact
    from smelt.data.splits import Example
    from smelt.runtimes.predict_texts import class_logits
    from smelt.runtimes.registry import open_runner

    folder, _ = chain
    texts = [*tiny.SENTENCES, " ".join(tiny.SENTENCES)]  # the last one is as long as the model takes
    rows = [
        Example(a, text_pair=b if i % 2 else None)
        for i, (a, b) in enumerate(zip(texts, texts[::-1], strict=True))
    ]
    logits = []
    for name in ("quantize", "onnx"):
        with open_runner(read_artifact(folder / "run" / "artifacts" / name), 1) as runner:
            logits.append(class_logits(runner, rows, batch_size=3))
    assert np.abs(logits[0] - logits[1]).mean() < 0.05 * logits[0].std()
    model = folder / "run" / "artifacts" / "onnx" / "model.onnx"
    names = [i.name for i in onnxruntime.InferenceSession(model).get_inputs()]
    family = json.loads((folder / "m" / "config.json").read_text())["model_type"]
    types = ["token_type_ids"] if family == "bert" else []
    assert names == ["input_ids", "attention_mask", *types]
    operators = steps_of(folder)["onnx"]["details"]["graphs"]["model"]["operators"]
    assert operators["DynamicQuantizeMatMul"] > 5
    assert not operators.keys() & {"MatMul", "Gemm"}


def test_eval_equals_report_scores(chain):
    folder, problem = chain
    result = harness.smelt(
        "eval", folder / "run" / "artifacts" / "onnx", "--data", folder / "data.jsonl", "--json"
    )
    quality = steps_of(folder)["onnx"]["quality"]
    assert json.loads(result.output) == {name: quality[name] for name in DEFAULTS_BY_PROBLEM[problem]}


def test_predict_accepts_tab_separated_pairs_and_equals_transformers(chain):
    folder, problem = chain
    first, second = "a man walks", "she sings a song"
    untouched = folder / "run" / "artifacts" / "model"
    result = harness.smelt("predict", untouched, f"{first}\t{second}", first)
    assert result.exit_code == 0, result.output
    pair, single = result.output.splitlines()
    assert pair != single
    model = AutoModelForSequenceClassification.from_pretrained(untouched)
    classify = pipeline(
        "text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(untouched)
    )
    for line, row in ((pair, {"text": first, "text_pair": second}), (single, {"text": first})):
        chances = {prediction["label"]: prediction["score"] for prediction in classify(row, top_k=None)}
        if problem == REGRESSION:
            assert float(line) == pytest.approx(chances["LABEL_0"], abs=1e-4)
            continue
        labels, numbers = line.split("\t")
        printed = dict(zip(labels.split("|"), numbers.split("|"), strict=True)) if labels else {}
        best = max(chances, key=chances.get)
        expected = (
            [best] if problem == SINGLE_LABEL else [n for n in classifiers.CLASS_NAMES if chances[n] > 0.5]
        )
        assert printed == {name: f"{chances[name]:.3f}" for name in expected}


def test_gate_on_error_metric_limits_its_rise(tmp_path):
    """mse falls from the model to the step that was trained: no drop; a lower limit of its fall fails."""
    tail = """
stages:
  - finetune: {max_steps: 20, batch_size: 4, learning_rate: 0.01, num_evals: 0}
score: {latency: false, quality: [mse]}
"""
    recipe = CHAIN.split("stages:", maxsplit=1)[0] + tail
    folder = home(
        tmp_path, "distilbert", REGRESSION, recipe + "gates: {mse: {max_degradation: 0.0, max: 100}}\n"
    )
    assert run(folder).exit_code == 0
    steps = steps_of(folder)
    before, after = (steps[name]["quality"]["mse"]["value"] for name in ("model", "finetune"))
    assert after < before
    [drop, _] = steps["finetune"]["gates"]
    assert drop["value"] == pytest.approx(after - before)
    (folder / "recipe.yaml").write_text(
        recipe.replace("quality: [mse]", "quality: [mse, pearson]")
        + f"baseline: finetune\ngates: {{mse: {{max_degradation: {(before - after) / 2}, at: model}}}}\n"
    )
    assert run(folder).exit_code == 3


def test_bare_encoder_gets_outputs_for_labels(tmp_path):
    """The names of all splits, in CSV with bars between them."""
    from transformers import BertModel

    folder = home(tmp_path, "bert", MULTI_LABEL, SHORT)
    BertModel.from_pretrained(folder / "m").save_pretrained(folder / "m")
    (folder / "data.csv").write_text("text,label\na man,glad|calm\ntwo dogs,\nthe cat,angry\n")
    (folder / "recipe.yaml").write_text(SHORT.replace("jsonl", "csv"))
    result = run(folder)
    assert result.exit_code == 0, result.output
    config = json.loads((folder / "run" / "artifacts" / "quantize" / "config.json").read_text())
    assert config["problem_type"] == MULTI_LABEL
    assert config["id2label"] == {"0": "angry", "1": "calm", "2": "glad"}
    [added] = [
        warning for warning in steps_of(folder)["model"]["warnings"] if warning["code"] == "new-classifier"
    ]
    assert "3 outputs" in added["message"]


def test_numeric_labels_make_bare_encoder_a_regressor(tmp_path):
    from transformers import DistilBertModel

    folder = home(tmp_path, "distilbert", REGRESSION, SHORT)
    DistilBertModel.from_pretrained(folder / "m").save_pretrained(folder / "m")
    result = run(folder)
    assert result.exit_code == 0, result.output
    assert tuple(steps_of(folder)["quantize"]["quality"]) == DEFAULTS_BY_PROBLEM[REGRESSION]


def test_new_classifier_requires_two_labels(tmp_path):
    from transformers import BertModel

    folder = home(tmp_path, "bert", SINGLE_LABEL, SHORT)
    BertModel.from_pretrained(folder / "m").save_pretrained(folder / "m")
    (folder / "data.jsonl").write_text('{"text": "a man", "label": "calm"}\n')
    assert command_error(harness.smelt("plan", folder / "recipe.yaml", code=2)).code == "one-label"


@pytest.mark.parametrize(("labels", "config", "score", "code", "setting", "named"), [
    (['"calm"', '"agry"', '"x"'], {}, "", "unknown-label", "data.test",
     ("data.jsonl:2: ", "'agry'", "calm, angry, glad", "'angry'?", "line 3.")),
    (['["calm"]', '["glad", "sad"]'], {}, "", "unknown-label", "data.test", ("data.jsonl:2: ", "'sad'")),
    (["0", "3"], {}, "", "unknown-label", "data.test", ("data.jsonl:2: ", " 3 ")),
    (["0.5"], {}, "", "unknown-label", "data.test", ("data.jsonl:1: ", "0.5")),
    (['["calm"]'], {"problem_type": SINGLE_LABEL}, "", "several-labels", "data.test",
     ("data.jsonl:1: ", "['calm']")),
    (['"good"'], {"id2label": {i: f"LABEL_{i}" for i in range(3)}}, "", "unknown-label", "data.test",
     ("id2label",)),
    (["0", "1"], {}, "quality: [f1_micro]", "does-not-fit-labels", "score.quality[0]",
     ("'f1_micro'", "multi_label_classification", "single_label_classification", ": accuracy, f1, ")),
    (["0", "1"], {}, "quality: [{f1: {label: gld}}]", "unknown-label", "score.quality[0]", ("'gld'", "glad")),
    (['["calm"]'], {}, "quality: [accuracy]", "does-not-fit-labels", "score.quality[0]", ("'accuracy'",)),
    (["0", "1"], {}, "gate: mse", "does-not-fit-labels", "gates.mse", ("'mse'", "regression")),
    (["0"], {"problem_type": "regression"}, "", "label-count", "data.test", ("data.jsonl:1: ", "3 ")),
    (["[0.5, 1, 2]", "[0.5, 1]"], {"problem_type": "regression"}, "", "label-count", "data.test",
     ("data.jsonl:2: ", "[0.5, 1]")),
    (["[0.5, 1, 2]"], {"problem_type": "regression"}, "quality: [mse, ndcg]", "does-not-fit-labels",
     "score.quality[1]", ("ndcg", "3 ")),
])  # fmt: skip
def test_labels_and_metrics_that_do_not_match_are_rejected_by_plan(
    tmp_path, labels, config, score, code, setting, named
):
    recipe = SHORT
    if score.startswith("quality"):
        recipe = recipe.replace("latency: false", f"latency: false, {score}")
    elif score:
        recipe += f"gates: {{{score.removeprefix('gate: ')}: {{max_degradation: 1}}}}\n"
    folder = home(tmp_path, "bert", SINGLE_LABEL, recipe, **config)
    lines = [json.dumps({"text": "a man"})[:-1] + f', "label": {label}}}' for label in labels]
    (folder / "data.jsonl").write_text("\n".join(lines))
    error = command_error(harness.smelt("plan", folder / "recipe.yaml", code=2))
    [message] = [entry for entry in error.messages if entry.code == code]
    assert message.setting == setting
    assert [value for value in named if value not in message.message] == []


def test_run_rejects_same_errors_in_data_too_large_for_plan(tmp_path, monkeypatch):
    """Large files are read only by the run; its labels and metrics are checked before the first step."""
    monkeypatch.setattr("smelt.pipeline.plan.run_checks._EAGER_READ_BYTES", 10)
    folder = home(
        tmp_path, "bert", MULTI_LABEL, SHORT.replace("latency: false", "latency: false, quality: [f1]")
    )
    assert harness.smelt("plan", folder / "recipe.yaml").exit_code == 0
    result = run(folder)
    assert result.exit_code == 2
    assert command_error(result).code == "does-not-fit-labels"
    assert all(value in str(command_error(result)) for value in ("score.quality: ", "'f1'"))
    (folder / "recipe.yaml").write_text(SHORT)
    assert run(folder).exit_code == 0
    assert tuple(steps_of(folder)["model"]["quality"]) == DEFAULTS_BY_PROBLEM[MULTI_LABEL]


def test_eval_rejects_mismatched_metric_and_labels(chain, tmp_path):
    folder, problem = chain
    artifact = folder / "run" / "artifacts" / "model"
    wrong_metric = "mse" if problem != REGRESSION else "accuracy"
    result = harness.smelt("eval", artifact, "--data", folder / "data.jsonl", "--metric", wrong_metric)
    assert result.exit_code == 2
    assert command_error(result).code == "does-not-fit-labels"
    assert f"'{wrong_metric}'" in str(command_error(result))
    if problem == SINGLE_LABEL:
        arguments = ("eval", artifact, "--data", folder / "data.jsonl", "--metric", "f1: {label: nobody}")
        assert command_error(harness.smelt(*arguments, code=2)).code == "unknown-label"
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": tiny.SENTENCES[0], "label": "nobody"}))
    result = harness.smelt("eval", artifact, "--data", tmp_path / "x.jsonl")
    assert result.exit_code == 2
    assert command_error(result).code == ("non-finite-label" if problem == REGRESSION else "unknown-label")
    assert all(value in str(command_error(result)) for value in ("x.jsonl:1: ", "'nobody'"))


UNLABELED = SHORT.replace("{latency: false}", "{latency: false, quality: [agreement]}").replace(
    "quantize: {}", "prune: {targets: [ffn], keep_ratio: 0.7, importance: magnitude}"
)


@pytest.mark.parametrize(("family", "problem"), [("distilbert", SINGLE_LABEL), ("bert", MULTI_LABEL)])
def test_unlabeled_samples_are_scored_by_agreement(tmp_path, family, problem):
    folder = home(tmp_path, family, problem, UNLABELED, problem_type=problem)
    rows = [{"text": text} for text in tiny.SENTENCES]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(folder).exit_code == 0
    report, steps = json.loads((folder / "run" / "report.json").read_text()), steps_of(folder)
    assert "agreement-only" in [warning["code"] for warning in report["warnings"]]
    artifacts = folder / "run" / "artifacts"
    lines = [
        harness.smelt("predict", artifacts / name, *tiny.SENTENCES).output.splitlines()
        for name in ("model", "prune")
    ]
    printed = [[line.split("\t")[0] for line in output] for output in lines]
    equal = 100 * sum(map(str.__eq__, *printed)) / len(rows)
    assert 0 < equal < 100
    warning = steps["prune"]["quality"]["agreement"]
    assert warning["value"] == steps["prune"]["agreement"]["equal"] == pytest.approx(equal)
    assert (warning["unit"], steps["model"]["quality"]["agreement"]["value"]) == ("%", 100)
    assert steps["prune"]["agreement"]["kl_divergence"] > 0
    assert steps["prune"]["examples"]["num_worse"] == round(len(rows) * (1 - equal / 100))
    arguments = ("eval", artifacts / "prune", "--data", folder / "data.jsonl", "--metric", "agreement")
    scored = harness.smelt(*arguments, "--baseline", artifacts / "model", "--json")
    assert json.loads(scored.output)["agreement"] == warning
    assert command_error(harness.smelt(*arguments)).code == "missing-baseline"


def test_regression_has_no_agreement(tmp_path):
    folder = home(tmp_path, "bert", REGRESSION, UNLABELED)
    assert command_error(harness.smelt("plan", folder / "recipe.yaml")).code == "does-not-fit-labels"


def test_metric_and_its_per_class_variants_are_all_reported(tmp_path):
    """Alone it keeps its name; without accuracy the confusions come from it, too."""
    from sklearn.metrics import f1_score, recall_score

    quality_setting = "quality: [{f1: {label: calm}}, f1, {f1: {label: glad}}, {recall: {label: glad}}]"
    gate = 'gates: {f1(calm): {min: 0}, "f1": {max_degradation: 100}}\n'
    folder = home(
        tmp_path, "bert", SINGLE_LABEL, SHORT.replace("latency: false", f"latency: false, {quality_setting}")
    )
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text() + gate)
    assert run(folder).exit_code == 0
    for name, step in steps_of(folder).items():
        assert list(step["quality"]) == ["f1(calm)", "f1", "f1(glad)", "recall"]
        with gzip.open(folder / "run" / "scores" / f"{name}.json.gz") as file:
            score = json.load(file)
        gold = [score["labels"][pair[1]] for pair in score["statistics"]["f1"]["rows"]]
        of_class = {"labels": score["labels"], "average": None, "zero_division": 0}
        f1 = dict(zip(score["labels"], f1_score(gold, score["predictions"], **of_class), strict=True))
        recall = recall_score(gold, score["predictions"], labels=["glad"], average="macro", zero_division=0)
        macro = f1_score(gold, score["predictions"], average="macro")
        values = [100 * fraction for fraction in (f1["calm"], macro, f1["glad"], recall)]
        assert [metric_score["value"] for metric_score in step["quality"].values()] == pytest.approx(values)
        assert step["confusion"]["counts"]
    assert [gate["metric"] for gate in steps_of(folder)["quantize"]["gates"]] == ["f1(calm)", "f1"]
    assert "F1 (glad)" in (folder / "run" / "report.md").read_text()
    rule = ("--fail-if", "f1(glad) drops 0.5 at quantize")
    harness.smelt("compare", folder / "run", folder / "run", *rule, code=0)
    same = quality_setting.replace("[{f1", "[{f1: {label: glad}}, {f1", 1)
    (folder / "recipe.yaml").write_text(SHORT.replace("latency: false", f"latency: false, {same}"))
    assert "duplicate-metric" in error_codes(
        command_error(harness.smelt("plan", folder / "recipe.yaml", code=2))
    )
