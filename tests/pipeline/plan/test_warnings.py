"""What is doubtful about a run's numbers is said in the plan, in the run and in every drawing of it."""

import json
from types import SimpleNamespace

import harness
import pytest
import tiny

from smelt.core.data import Example, Split
from smelt.evaluate.report.html import write_html
from smelt.evaluate.report.markdown import write_markdown
from smelt.evaluate.report.table import table
from smelt.plan.warnings import data_warnings, decoding_warnings, few_windows, kept_last
from smelt.recipe.recipe import parse_recipe

ROWS = 120


def _recipe(task="translation", more=""):
    return parse_recipe(f"model: m\ntask: {task}\ndata: {{train: a, test: b}}\nstages: []\n{more}", "r.yaml")


def _pairs(*rows):
    return Split("f", tuple(Example(text, (target,)) for text, target in rows))


def _many(start, rows=ROWS):
    return [(f"{start} {i}", f"target {i}") for i in range(rows)]


def _said(splits, task="translation", trains=True):
    return data_warnings(_recipe(task), trains, splits)


def test_nothing_is_said_of_data_that_are_in_order():
    splits = {name: _pairs(*_many(name)) for name in ("train", "validation", "test")}
    assert _said(splits) == []


def test_trainings_without_validation_rows_are_told_that_they_keep_their_last_weights():
    def step(name, **settings):
        return SimpleNamespace(name=name, settings=SimpleNamespace(**settings))

    steps = [step("prune"), step("small", select="loss"), step("tuned", select="bleu")]
    (said,) = kept_last(_recipe(), steps)
    assert "small, tuned" in said
    assert kept_last(_recipe(), steps[:1]) == []
    chosen = parse_recipe(
        "model: m\ntask: translation\ndata: {train: a, test: b, split: {validation: 0.1}}\nstages: []\n",
        "r.yaml",
    )
    assert kept_last(chosen, steps) == []


def test_texts_that_may_be_several_rows_are_counted():
    rows = [*(Example(*row[:1], (row[1],), line=n) for n, row in enumerate(_many("a"), start=2))]
    rows[7] = Example("Hello\thallo\nbye", ("er ruft",), line=10)
    [found] = _said({"test": Split("test.tsv", tuple(rows))})
    assert "line 10" in found
    assert _said({"test": Split("test.jsonl", tuple(rows))}) == []


@pytest.mark.parametrize(("rows", "said"), [(99, True), (100, False)])
def test_few_test_rows_are_warned_of(rows, said):
    found = _said({"test": _pairs(*_many("x", rows))})
    assert found == (
        ["test has 99 rows; below 100 the intervals are too wide to tell most steps apart."] if said else []
    )
    assert _said({"test": _pairs(*_many("x", rows))}, "language-modeling") == []


def test_test_rows_that_are_in_train_are_counted():
    train = _pairs(*_many("a"), ("b 1", "other"))
    test = _pairs(*_many("b", 100), *_many("a", 20))
    assert _said({"train": train, "test": test}) == [
        "20 of 120 test rows are also in train, word for word; 1 more have a text of train with another"
        " target. A score on what that was learned says less of new texts."
    ]
    assert _said({"train": train, "test": test}, trains=False) == []
    assert (
        "20 of 120 test rows are also in validation, word for word"
        in _said({"validation": train, "test": test})[0]
    )


def test_a_copy_shares_one_of_several_references():
    train = Split("f", (Example("a", ("x", "y")),))
    for target, said in (("y", "are also in train"), ("z", "have a text of train with another target")):
        test = Split("f", (Example("a", (target, "w")), *(Example(f"{i}", ("t",)) for i in range(ROWS))))
        [found] = _said({"train": train, "test": test})
        assert found.startswith("1 of 121 test rows")
        assert said in found


def test_pairs_of_texts_are_copies_when_both_are():
    rows = [Example("a", text_pair=f"{i}", label="x") for i in range(ROWS)]
    train, test = Split("f", tuple(rows[:60])), Split("f", tuple(rows[60:] * 2))
    assert _said({"train": train, "test": test}, "text-classification") == []
    doubled = Split("f", (*test.examples, rows[0]))
    assert "1 of 121 test rows" in _said({"train": train, "test": doubled}, "text-classification")[0]


def test_short_lines_of_running_text_are_no_copies():
    long = "This line is long enough that nobody would write it twice by chance, whatever it says."
    train = Split("f", (Example(""), Example(" = Title = "), Example(long)))
    test = Split("f", (Example(""), Example(" = Title = "), Example("x" * 90)))
    assert _said({"train": train, "test": test}, "language-modeling") == []
    twice = Split("f", (*test.examples, Example(long)))
    assert (
        "1 of 2 test rows of 80 characters or more are also in train"
        in _said({"train": train, "test": twice}, "language-modeling")[0]
    )


def test_labels_that_differ_in_case_or_blanks_are_named_with_counts():
    labels = ["positive"] * 100 + ["Positive"] * 3 + [" positive"] + ["negative"] * 10
    test = Split("f", tuple(Example(f"{i}", label=label) for i, label in enumerate(labels)))
    assert _said({"test": test}, "text-classification") == [
        "labels that only case or blanks tell apart are different classes: 'positive' (100 rows), 'Positive'"
        " (3 rows), ' positive' (1 row); write them alike."
    ]


@pytest.mark.parametrize(
    ("own", "more", "words"),
    [
        ({"num_beams": 4}, "", "asks for 4 beams, and greedy search is scored and timed"),
        ({"num_beams": 4}, "score: {generation: {max_new_tokens: 9}}", "asks for 4 beams"),
        ({"num_beams": 4}, "score: {generation: {beams: 4}}", None),
        ({"num_beams": 4}, "score: {generation: {beams: 1}}", None),
        ({"num_beams": 4}, "score: {generation: {do_sample: true}}", None),
        ({"num_beams": 1}, "", None),
        ({"do_sample": True}, "", "asks for sampling, and greedy search is scored"),
        ({"do_sample": True}, "score: {generation: {do_sample: false}}", None),
        ({}, "", None),
    ],
)
def test_decoding_that_the_model_asks_for_and_does_not_get_is_named(tmp_path, own, more, words):
    (tmp_path / "config.json").write_text(json.dumps({"num_beams": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    found = decoding_warnings(_recipe(more=more), tmp_path)
    assert words in found[0] if words else found == []
    assert decoding_warnings(_recipe("text-classification"), tmp_path) == []
    (tmp_path / "generation_config.json").unlink()
    assert "asks for 9 beams" in decoding_warnings(_recipe(), tmp_path)[0]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The plan's words and the report of a run with all kinds of doubt; its train is read by the run only."""
    home = tmp_path_factory.mktemp("home")
    tiny.marian(home / "m")
    path = home / "m" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_beams": 3}))
    tiny.pairs(home / "data.jsonl", 8)
    (home / "r.yaml").write_text(
        "model: m\ntask: translation\ndata: {train: data.jsonl, test: data.jsonl}\n"
        "stages: [{prune: {what: [ffn], keep: 0.5}}]\n"
        "score: {quality: [bleu], generation: {max_new_tokens: 3}, latency: false}\n"
    )
    planned = harness.smelt("plan", home / "r.yaml")
    assert planned.exit_code == 0
    ran = harness.smelt("run", home / "r.yaml", "--out", home / "r", "--limit", "5")
    assert ran.exit_code == 0, ran.output
    return planned.output, ran.output, json.loads((home / "r" / "report.json").read_text())


DOUBTS = ("test has 8 rows; below 100", "8 of 8 test rows are also in train", "config asks for 3 beams")


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_doubt_is_said_everywhere(report, doubt):
    planned, ran, found = report
    drawn = [planned, ran, table(found), write_markdown(found), write_html(found)]
    assert all(doubt in " ".join(text.split()) for text in drawn)
    assert len([text for text in found["warnings"] if doubt in text]) == 1


def test_outputs_that_were_cut_are_counted_for_each_step(report):
    for step in report[2]["steps"]:
        [said] = [text for text in step["warnings"] if "(max_new_tokens)" in text]
        assert "of 5 outputs (" in said
        assert "did not end within 3 tokens" in said
        assert said in " ".join(write_markdown(report[2]).replace("\\", "").split())
    told = " ".join(report[1].split())
    assert "warning: 'model', 'prune': " in told


def test_what_only_the_run_reads_is_doubted_by_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("smelt.plan.inputs._READ_AT_ONCE_BYTES", 10)
    monkeypatch.setattr("smelt.plan.plan.fetch_model", lambda *a: tmp_path / "m")
    tiny.marian(tmp_path / "m")
    path = tmp_path / "m" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_beams": 3}))
    tiny.pairs(tmp_path / "data.jsonl", 8)
    (tmp_path / "r.yaml").write_text(
        "model: someone/m\ntask: translation\ndata: {test: data.jsonl}\nstages: []\nscore: {latency: false}\n"
    )
    planned = harness.smelt("plan", tmp_path / "r.yaml")
    assert "warning" not in planned.output
    ran = harness.smelt("run", tmp_path / "r.yaml", "--out", tmp_path / "r")
    assert ran.exit_code == 0, ran.output
    for doubt in ("warning: test has 8 rows", "warning: the model's generation config asks for 3 beams"):
        assert ran.output.count(doubt) == 2  # when it was seen, and under the table


def test_sizes_are_not_compared_across_dtypes_without_a_word(tmp_path):
    from transformers import AutoModelForSequenceClassification

    tiny.bert(tmp_path / "m")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "m", local_files_only=True)
    model.half().save_pretrained(tmp_path / "m")
    tiny.labelled(tmp_path / "data.jsonl", 8)
    (tmp_path / "r.yaml").write_text(
        "model: m\ntask: text-classification\ndata: {test: data.jsonl}\n"
        "stages:\n  - onnx: {}\n    name: whole\n"
        "  - onnx: {target: ort-cuda, dtype: fp16}\n    from: model\n    name: half\n"
        "score: {latency: false}\n"
    )
    ran = harness.smelt("run", tmp_path / "r.yaml", "--out", tmp_path / "r", "--quiet")
    assert ran.exit_code == 0, ran.output
    found = json.loads((tmp_path / "r" / "report.json").read_text())
    dtypes = {step["name"]: step["float_dtype"] for step in found["steps"]}
    assert dtypes == {"model": dtypes["model"], "whole": "float32", "half": "float16"}
    odd = "half" if dtypes["model"] == "float32" else "whole"
    said = (
        f"sizes: what is no code is {dtypes['model']} in 'model' and {dtypes[odd]} in {odd}, so their sizes"
    )
    assert said in " ".join(ran.output.split())
    assert f" %, floats in {dtypes[odd]})" in write_markdown(found)
    page = write_html(found)
    assert f" %, floats in {dtypes[odd]}, the baseline's in another type" in page.replace("&#39;", "'")
    assert f" %, {dtypes[odd]}</abbr></small>" in page
    [half] = [step for step in found["steps"] if step["name"] == "half"]
    assert (
        "this graph is for CUDA and was run on the CPU, where ONNX Runtime computes most"
        in half["warnings"][-1]
    )
    assert not [text for step in found["steps"][:2] for text in step["warnings"] if "for CUDA" in text]
    folder = tmp_path / "r" / "artifacts" / "half"
    scored = harness.smelt("eval", folder, "--data", tmp_path / "data.jsonl", "--json")
    assert "warning: this graph is for CUDA and was run on the CPU" in scored.stderr
    assert json.loads(scored.stdout)["accuracy"]["n"] == 8


@pytest.mark.parametrize(
    ("count", "told"), [(1, "test has 1 window; "), (99, "test has 99 windows; "), (100, None)]
)
def test_few_windows_of_a_text_are_told_once(count, told):
    rows = {"rows": [[1.0, 2, 3]] * count}
    found = few_windows({"perplexity": rows, "bits_per_byte": rows}, "test")
    assert [text[: len(told or "")] for text in found] == ([told] if told else [])
    assert few_windows({"bleu": rows}, "test") == []
