"""What is doubtful about a run's numbers is said in the plan, in the run and in every drawing of it."""

import html
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from smelt.core.messages import message_codes
from smelt.data.npz_arrays import SampleArrays
from smelt.data.splits import Example, Split, split_from_arrays
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html, render_table
from smelt.pipeline.execute.scores.text import truncated_output_warnings
from smelt.pipeline.plan.warnings import (
    data_warnings,
    decoding_warnings,
    few_windows_warnings,
    last_checkpoint_warnings,
)
from tests.support import harness
from tests.support.models import tiny
from tests.support.parsed_recipes import parse_recipe

ROWS = 120


def _recipe(task="translation", more=""):
    text = f"model: m\ntask: {task}\ndata: {{train: a, test: b}}\nstages: []\n{more}"
    return parse_recipe(text, Path("r.yaml"))


def _pairs(*rows):
    return Split("f", tuple(Example(text, (target,)) for text, target in rows))


def _many(start, rows=ROWS):
    return [(f"{start} {i}", f"target {i}") for i in range(rows)]


def _said(splits, task="translation", trains=True):
    return data_warnings(_recipe(task), trains, splits)


def test_valid_data_give_no_warnings():
    splits = {name: _pairs(*_many(name)) for name in ("train", "validation", "test")}
    assert _said(splits) == []


def test_training_without_validation_samples_warns():
    def step(name, **settings):
        return SimpleNamespace(name=name, settings=SimpleNamespace(**settings))

    steps = [
        step("prune"),
        step("small", metric_for_best_model="loss"),
        step("tuned", metric_for_best_model="bleu"),
    ]
    (warning,) = last_checkpoint_warnings(_recipe(), steps)
    assert warning.code == "no-validation-data"
    assert "small, tuned" in warning.message
    assert last_checkpoint_warnings(_recipe(), steps[:1]) == []
    chosen = parse_recipe(
        "model: m\ntask: translation\ndata: {train: a, test: b, split: {validation: 0.1}}\nstages: []\n",
        Path("r.yaml"),
    )
    assert last_checkpoint_warnings(chosen, steps) == []


def test_unclosed_quotes_in_tsv_warn():
    rows = [*(Example(*row[:1], (row[1],), line=n) for n, row in enumerate(_many("a"), start=2))]
    rows[7] = Example("Hello\thallo\nbye", ("er ruft",), line=10)
    [warning] = _said({"test": Split("test.tsv", tuple(rows))})
    assert warning.code == "unclosed-quote"
    assert (warning.file, warning.line) == ("test.tsv", 10)
    assert _said({"test": Split("test.jsonl", tuple(rows))}) == []


@pytest.mark.parametrize(("rows", "warned"), [(99, True), (100, False)])
def test_few_test_samples_warn(rows, warned):
    warnings = _said({"test": _pairs(*_many("x", rows))})
    assert message_codes(warnings) == (["few-test-rows"] if warned else [])
    assert all("99" in warning.message for warning in warnings)
    assert _said({"test": _pairs(*_many("x", rows))}, "language-modeling") == []


def test_test_samples_in_train_are_counted():
    train = _pairs(*_many("a"), ("b 1", "other"))
    test = _pairs(*_many("b", 100), *_many("a", 20))
    (warning,) = _said({"train": train, "test": test})
    assert warning.code == "test-rows-in-other-split"
    assert re.findall(r"\d+", warning.message) == [
        "20",
        "120",
        "1",
    ]  # copies, rows, texts with another target
    assert _said({"train": train, "test": test}, trains=False) == []
    (warning,) = _said({"validation": train, "test": test})
    assert warning.code == "test-rows-in-other-split"
    assert re.findall(r"\d+", warning.message) == ["20", "120", "1"]
    assert "validation" in warning.message


def test_test_samples_in_calibration_are_counted():
    def arrays(*starts):
        x = np.concatenate([np.arange(start, start + 60) for start in starts])
        return split_from_arrays("f.npz", SampleArrays({"x": x[:, None], "k": np.float32(2)}, len(x)))

    test = arrays(0, 60)
    for name in ("calibration", "validation", "train"):
        assert _said({name: arrays(200), "test": test}, "custom", trains=False) == []
        (warning,) = _said({name: arrays(100, 200), "test": test}, "custom", trains=False)
        assert warning.code == "test-rows-in-other-split"
        assert re.findall(r"\d+", warning.message) == ["20", "120"]
        assert f" in {name}," in warning.message
    # stages see the first of these that is there
    assert _said({"calibration": arrays(200), "train": test, "test": test}, "custom", trains=False) == []
    (warning,) = _said({"calibration": Split("f", (Example("b 1"),)), "test": _pairs(*_many("b"))})
    assert re.findall(r"\d+", warning.message) == ["1", "120"]


def test_copy_shares_one_of_several_references():
    train = Split("f", (Example("a", ("x", "y")),))
    for target, code in (("y", "test-rows-in-other-split"), ("z", "test-texts-in-other-split")):
        test = Split("f", (Example("a", (target, "w")), *(Example(f"{i}", ("t",)) for i in range(ROWS))))
        [warning] = _said({"train": train, "test": test})
        assert warning.code == code
        assert re.findall(r"\d+", warning.message) == ["1", "121"]


def test_text_pairs_are_copies_if_both_texts_match():
    rows = [Example("a", text_pair=f"{i}", label="x") for i in range(ROWS)]
    train, test = Split("f", tuple(rows[:60])), Split("f", tuple(rows[60:] * 2))
    assert _said({"train": train, "test": test}, "text-classification") == []
    doubled = Split("f", (*test.examples, rows[0]))
    [warning] = _said({"train": train, "test": doubled}, "text-classification")
    assert warning.code == "test-rows-in-other-split"
    assert re.findall(r"\d+", warning.message) == ["1", "121"]


def test_short_lines_of_running_text_are_not_copies():
    long_line = "This line is long enough that nobody would write it twice by chance, whatever it says."
    train = Split("f", (Example(""), Example(" = Title = "), Example(long_line)))
    test = Split("f", (Example(""), Example(" = Title = "), Example("x" * 90)))
    assert _said({"train": train, "test": test}, "language-modeling") == []
    twice = Split("f", (*test.examples, Example(long_line)))
    [warning] = _said({"train": train, "test": twice}, "language-modeling")
    assert warning.code == "test-rows-in-other-split"
    assert re.findall(r"\d+", warning.message) == ["1", "2", "80"]  # copies, rows, characters


@pytest.mark.parametrize(("tags", "warns"), [
    (("o", "B-PER"), True), (("O ", "B-PER"), True), (("o", "O"), False), (("NOUN", "VERB"), False),
    ((0, 1), False),
])  # fmt: skip
def test_tag_like_outside_is_reported_if_no_tag_is_outside(tags, warns):
    test = Split("f", (Example("a b", label=tags, words=("a", "b")),) * ROWS)
    codes = [message.code for message in _said({"test": test}, "token-classification")]
    assert ("no-outside-tag" in codes) is warns


@pytest.mark.parametrize(("validation", "trains", "codes"), [
    (["a", "b"], True, []), (["a", "c"], True, ["class-not-in-train"]), (["a", "c"], False, []),
    (["a|c"], True, ["class-not-in-train"]), (["0", "1"], True, []),
])  # fmt: skip
def test_class_that_no_training_sample_has_is_reported(validation, trains, codes):
    """Labels of a split that are all others, such as numbers instead of names, are not compared."""
    splits = {
        name: Split(name, tuple(Example(f"{name} {i}", label=label) for i, label in enumerate(labels)))
        for name, labels in (("train", ["a", "b"] * 50), ("validation", validation))
    }
    messages = _said(splits, "text-classification", trains)
    assert [message.code for message in messages if message.code == "class-not-in-train"] == codes
    assert all("'c'" in message.message for message in messages if message.code == "class-not-in-train")


def test_labels_differing_in_case_or_blanks_are_counted():
    labels = ["positive"] * 100 + ["Positive"] * 3 + [" positive"] + ["negative"] * 10
    test = Split("f", tuple(Example(f"{i}", label=label) for i, label in enumerate(labels)))
    [warning] = _said({"test": test}, "text-classification")
    assert warning.code == "labels-spelled-alike"
    assert re.findall(r"'(.*?)' \((\d+)", warning.message) == [
        ("positive", "100"),
        ("Positive", "3"),
        (" positive", "1"),
    ]


@pytest.mark.parametrize(("model_config", "more", "named"), [
    ({"num_beams": 4}, "", "4 beams"),
    ({"num_beams": 4}, "score: {generation: {max_new_tokens: 9}}", "4 beams"),
    ({"num_beams": 4}, "score: {generation: {num_beams: 4}}", None),
    ({"num_beams": 4}, "score: {generation: {num_beams: 1}}", None),
    ({"num_beams": 4}, "score: {generation: {do_sample: true}}", None), ({"num_beams": 1}, "", None),
    ({"do_sample": True}, "", "sampling"),
    ({"do_sample": True}, "score: {generation: {do_sample: false}}", None), ({}, "", None),
])  # fmt: skip
def test_unused_generation_config_of_model_warns(tmp_path, model_config, more, named):
    (tmp_path / "config.json").write_text(json.dumps({"num_beams": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps(model_config))
    warnings = decoding_warnings(_recipe(more=more), tmp_path)
    assert message_codes(warnings) == (["generation-config-differs"] if named else [])
    assert all(named in warning.message for warning in warnings)
    assert decoding_warnings(_recipe("text-classification"), tmp_path) == []
    (tmp_path / "generation_config.json").unlink()
    [warnings] = decoding_warnings(_recipe(), tmp_path)
    assert (warnings.code, "9 beams" in warnings.message) == ("generation-config-differs", True)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The plan's words and the report of a run with all kinds of doubt; its train is read by the run only."""
    home = tmp_path_factory.mktemp("home")
    tiny.write_marian(home / "m")
    path = home / "m" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_beams": 3}))
    tiny.write_pairs(home / "data.jsonl", 8)
    (home / "r.yaml").write_text(
        "model: m\ntask: translation\ndata: {train: data.jsonl, test: data.jsonl}\n"
        "stages: [{prune: {targets: [ffn], keep_ratio: 0.5}}]\n"
        "score: {quality: [bleu], generation: {max_new_tokens: 3}, latency: false}\n"
    )
    planned = harness.smelt("plan", home / "r.yaml")
    assert planned.exit_code == 0
    result = harness.smelt("run", home / "r.yaml", "--out", home / "r", "--limit", "5")
    assert result.exit_code == 0, result.output
    return planned.output, result.output, json.loads((home / "r" / "report.json").read_text())


DOUBTS = {
    "few-test-rows": ("8",),
    "test-rows-in-other-split": ("8", "8"),
    "generation-config-differs": ("3",),
}


@pytest.mark.parametrize("code", DOUBTS)
def test_warning_is_shown_in_plan_run_and_reports(report, code):
    planned, run_output, content = report
    [warning] = [entry for entry in content["warnings"] if entry["code"] == code]
    numbers = DOUBTS[code]
    assert tuple(re.findall(r"\d+", warning["message"])[: len(numbers)]) == numbers
    page = html.unescape(render_html(content))
    outputs = [planned, run_output, render_table(content), render_markdown(content).replace("\\", ""), page]
    assert all(warning["message"] in " ".join(text.split()) for text in outputs)
    assert not any("severity=" in text for text in outputs)  # its text, and not the object


def test_truncated_outputs_are_counted_for_each_step(report):
    for step in report[2]["steps"]:
        [warning] = [entry for entry in step["warnings"] if entry["code"] == "outputs-not-ended"]
        message = warning["message"]
        count, rows, *_, tokens = re.findall(r"\d+", message)
        assert (int(count) > 0, rows, tokens) == (True, "5", "3")
        assert message in " ".join(render_markdown(report[2]).replace("\\", "").split())
    text = " ".join(report[1].split())
    assert "warning: 'model', 'prune': " in text


@pytest.mark.parametrize(("tokens", "setting"), [(8, "score.generation.max_new_tokens"), (5, None)])
def test_warning_names_max_new_tokens_if_it_limits_outputs(tokens, setting):
    [message] = truncated_output_warnings([(3, tokens)], 10, 8)
    assert message.setting == setting


def test_data_read_only_by_run_warn_in_run(tmp_path, monkeypatch):
    monkeypatch.setattr("smelt.pipeline.plan.run_checks._EAGER_READ_BYTES", 10)
    monkeypatch.setattr("smelt.pipeline.plan.plan.fetch_model", lambda *a: tmp_path / "m")
    tiny.write_marian(tmp_path / "m")
    path = tmp_path / "m" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_beams": 3}))
    tiny.write_pairs(tmp_path / "data.jsonl", 8)
    (tmp_path / "r.yaml").write_text(
        "model: someone/m\ntask: translation\ndata: {test: data.jsonl}\nstages: []\nscore: {latency: false}\n"
    )
    planned = harness.smelt("plan", tmp_path / "r.yaml")
    assert "warning" not in planned.output
    result = harness.smelt("run", tmp_path / "r.yaml", "--out", tmp_path / "r")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert [warning["code"] for warning in report["warnings"]] == [
        "few-test-rows",
        "generation-config-differs",
    ]
    for expected_warning in report["warnings"]:  # when it was seen, and under the table
        assert " ".join(result.output.split()).count(f"warning: {expected_warning['message']}") == 2


def test_sizes_across_dtypes_warn(tmp_path):
    from transformers import AutoModelForSequenceClassification

    tiny.write_bert(tmp_path / "m")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "m", local_files_only=True)
    model.half().save_pretrained(tmp_path / "m")
    tiny.write_labeled(tmp_path / "data.jsonl", 8)
    (tmp_path / "r.yaml").write_text(
        "model: m\ntask: text-classification\ndata: {test: data.jsonl}\n"
        "stages:\n  - onnx: {}\n    name: whole\n"
        "  - onnx: {target: ort-cuda, dtype: fp16}\n    from: model\n    name: half\n"
        "score: {latency: false}\n"
    )
    result = harness.smelt("run", tmp_path / "r.yaml", "--out", tmp_path / "r", "--quiet")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "r" / "report.json").read_text())
    dtypes = {step["name"]: step["float_dtype"] for step in content["steps"]}
    assert dtypes == {"model": dtypes["model"], "whole": "float32", "half": "float16"}
    other_step = "half" if dtypes["model"] == "float32" else "whole"
    [warning] = [one["message"] for one in content["warnings"] if one["code"] == "sizes-differ-in-dtype"]
    assert all(value in warning for value in (dtypes["model"], "'model'", dtypes[other_step], other_step))
    assert warning in " ".join(result.output.split())
    size = next(
        line for line in render_markdown(content).splitlines() if line.startswith("|") and other_step in line
    )
    assert dtypes[other_step] in size
    assert f" %, {dtypes[other_step]}</abbr></small>" in render_html(content)
    [half] = [step for step in content["steps"] if step["name"] == "half"]
    assert half["warnings"][-1]["code"] == "other-device"
    assert not [
        one for step in content["steps"][:2] for one in step["warnings"] if one["code"] == "other-device"
    ]
    folder = tmp_path / "r" / "artifacts" / "half"
    scored = harness.smelt("eval", folder, "--data", tmp_path / "data.jsonl", "--json")
    assert f"warning: {half['warnings'][-1]['message']}" in " ".join(scored.stderr.split())
    assert json.loads(scored.stdout)["accuracy"]["n"] == 8


@pytest.mark.parametrize(("count", "few"), [(1, True), (99, True), (100, False)])
def test_few_windows_warn_once(count, few):
    rows = {"rows": [[1.0, 2, 3]] * count}
    warnings = few_windows_warnings({"perplexity": rows, "bits_per_byte": rows}, "test")
    assert message_codes(warnings) == (["few-windows"] if few else [])
    assert all(str(count) in warning.message for warning in warnings)
    assert few_windows_warnings({"bleu": rows}, "test") == []
