"""Several runs in one table: paired tests where the samples are equal, rules, refusals."""

import copy
import gzip
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from smelt.core.errors import InputError
from smelt.evaluate.quality import score_texts
from smelt.evaluate.report.comparison import (
    compare_runs,
    comparison_html,
    comparison_markdown,
    comparison_notes,
    comparison_plot,
    comparison_text,
    read_runs,
)
from smelt.evaluate.report.fail_rules import NotJudged, Regression, check_rules
from smelt.evaluate.report.schema import SCORES_FOLDER
from smelt.evaluate.significance import Statistics, compare_steps, holm
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.standins.sample_report import mark_disturbed, ten_step_report

pytestmark = pytest.mark.quick

SVG = "http://www.w3.org/2000/svg"
REFERENCES = [f"the {animal} sat on the {place}" for animal in ("cat", "dog", "cow") for place in "abcdefgh"]
WORSE = [text.replace("sat", "lay") if at % 2 else text for at, text in enumerate(REFERENCES)]


def write_run(folder, outputs, task="translation", references=REFERENCES):
    """Write the folder of a run whose only scored step, `prune`, wrote `outputs`; return the folder."""
    report = copy.deepcopy(ten_step_report())
    report["recipe"]["task"] = task
    score = score_texts(["bleu"], outputs, [[text] for text in references])["bleu"]
    for step in report["steps"]:
        step["quality"] = {"bleu": score.to_report()} if step["quality"] else {}
        step["against_baseline"] = step["against_parent"] = {}
        step["gates"] = []
    (folder / SCORES_FOLDER).mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report))
    score_record = {"statistics": {"bleu": score.statistics.dump()}, "predictions": outputs}
    names = [step["name"] for step in report["steps"] if step["quality"]]
    (folder / SCORES_FOLDER / f"{names[1]}.json.gz").write_bytes(
        gzip.compress(json.dumps(score_record).encode())
    )
    return folder, names


@pytest.fixture(name="runs")
def _runs(tmp_path):
    old, names = write_run(tmp_path / "old", REFERENCES)
    new, _ = write_run(tmp_path / "new", WORSE)
    return old, new, names


def entry(comparison, step):
    return next(step_entry for step_entry in comparison["steps"] if step_entry["step"] == step)["runs"]


def test_differences_use_paired_test_with_holm_correction(runs):
    old, new, names = runs
    comparison = compare_runs(read_runs([old, new, old]))
    sides = [
        Statistics.model_validate(score_texts(["bleu"], texts, [[t] for t in REFERENCES])["bleu"].statistics)
        for texts in (WORSE, REFERENCES)
    ]
    expected = [compare_steps(*sides), compare_steps(sides[1], sides[1])]
    corrected = holm([difference["p_value"] for difference in expected])
    actual = [run["quality"]["bleu"].get("difference") for run in entry(comparison, names[1])]
    assert actual[0] is None
    assert actual[1:] == [
        difference | {"p_value_holm": p} for difference, p in zip(expected, corrected, strict=True)
    ]
    assert actual[1]["difference"] < -10
    # the other steps have no stored statistics
    assert entry(comparison, names[0])[1]["quality"]["bleu"]["reason"] == "no-reference-statistics"


def test_different_samples_are_not_compared_in_pairs(runs, tmp_path):
    old, _, names = runs
    other, _ = write_run(tmp_path / "other", WORSE, references=[f"{text} today" for text in REFERENCES])
    score = entry(compare_runs(read_runs([old, other])), names[1])[1]["quality"]["bleu"]
    assert (score["reason"], "difference" in score) == ("other-examples", False)


def rename_step(folder, name):
    report = (folder / "report.json").read_text()
    (folder / "report.json").write_text(report.replace(json.dumps(name), '"renamed"'))


def remove_file(folder, name):
    (folder / SCORES_FOLDER / f"{name}.json.gz").unlink()


@pytest.mark.parametrize(("reason", "change"), [
    ("no-reference-step", lambda old, new, name: rename_step(old, name)),
    ("no-reference-step", lambda old, new, name: change_step(old, name, skip)),
    ("no-reference-score", lambda old, new, name: change_step(old, name, lambda s: s.update(quality={}))),
    ("no-reference-statistics", lambda old, new, name: remove_file(old, name)),
    ("no-statistics", lambda old, new, name: remove_file(new, name)),
])  # fmt: skip
def test_missing_paired_test_has_one_reason(runs, reason, change):
    old, new, names = runs
    change(old, new, names[1])
    comparison = compare_runs(read_runs([old, new]))
    assert entry(comparison, names[1])[1]["quality"]["bleu"]["reason"] == reason


def test_each_step_without_a_paired_test_is_in_one_note(runs, tmp_path):
    old, _, names = runs
    other, _ = write_run(tmp_path / "other", WORSE, references=[f"{text} today" for text in REFERENCES])
    notes = comparison_notes(compare_runs(read_runs([old, other])))
    untested = [set(re.split(r"[\s,:]+", note)) & {*names} for note in notes if "bleu" in note]
    assert sorted(untested, key=len) == [{names[1]}, {*names} - {names[1]}]


def test_disturbed_speeds_are_marked(runs):
    old, new, names = runs
    report = json.loads((new / "report.json").read_text())
    (step,) = [step for step in report["steps"] if step["name"] == names[1]]
    mark_disturbed(step["latency"][0])
    (new / "report.json").write_text(json.dumps(report))
    lines = comparison_text(compare_runs(read_runs([old, new]))).splitlines()
    assert [line.split()[:2] for line in lines if "×?" in line] == [[names[1], "new"]]


def test_rules_name_quantity_direction_limit_and_step(runs):
    old, new, names = runs
    comparison = compare_runs(read_runs([old, new]))
    old_bleu, new_bleu = (run["quality"]["bleu"]["value"] for run in entry(comparison, names[1]))
    drop = old_bleu - new_bleu
    [regression] = check_rules(comparison, [f"bleu drops 0.5 at {names[1]}"])
    assert (regression.step, regression.run, regression.change) == (names[1], "new", pytest.approx(-drop))
    assert check_rules(comparison, [f"bleu drops {drop + 1:.2f} at {names[1]}"]) == []
    assert check_rules(comparison, [f"bleu rises 0 at {names[1]}"]) == []
    [share] = check_rules(comparison, [f"bleu drops 1% at {names[1]}"])
    assert share.change == pytest.approx(-drop)  # of 100
    assert check_rules(comparison, ["size rises 0", "latency rises 0%", "speedup drops 0"]) == []


def change_step(folder, name, change):
    """Apply `change` to the step `name` of a run's report."""
    report = json.loads((folder / "report.json").read_text())
    change(next(step for step in report["steps"] if step["name"] == name))
    (folder / "report.json").write_text(json.dumps(report))


def test_operations_are_compared_and_limited(runs):
    old, new, names = runs
    change_step(old, names[1], lambda step: step.update(operations=3_000_000))
    change_step(new, names[1], lambda step: step.update(operations=4_500_000))
    comparison = compare_runs(read_runs([old, new]))
    assert [run["operations"] for run in entry(comparison, names[1])] == [3_000_000, 4_500_000]
    assert "4.50" in comparison_text(comparison)
    [regression] = check_rules(comparison, ["operations rises 10%"])
    assert (regression.step, regression.change) == (names[1], 50.0)
    assert check_rules(comparison, ["operations rises 1500000"]) == []


def skip(step):
    step.update(status="skipped", reason="no device", quality={}, latency=[], artifact=None, size_bytes=None)


def other_batches(step):
    for row in step["latency"]:
        row.update(batch_size=row["batch_size"] * 8, p50_ms=row["p50_ms"] * 6)


@pytest.mark.parametrize(("rule", "change", "reason"), [
    ("bleu drops 1", skip, "no-step"), ("size rises 5%", skip, "no-step"),
    ("bleu drops 1", lambda step: step.update(quality={}), "not-measured"),
    ("latency rises 900%", other_batches, "other-batch-size"),
    ("speedup drops 90%", other_batches, "other-batch-size"),
    ("latency rises 10%", lambda step: mark_disturbed(step["latency"][0]), "disturbed-times"),
    ("latency rises 10%", lambda step: step["latency"][0].update(threads=2), "other-threads"),
    ("latency rises 10%", lambda step: step.update(latency=[]), "not-measured"),
])  # fmt: skip
def test_fail_if_reports_unchecked_steps_as_not_judged(runs, rule, change, reason):
    old, new, names = runs
    for name in names:
        change_step(new, name, change)
    regressions = check_rules(compare_runs(read_runs([old, new])), [f"{rule} at {names[1]}"])
    assert regressions == [NotJudged(f"{rule} at {names[1]}", names[1], "new", reason)]


def test_rule_is_not_judged_if_samples_differ_or_are_missing(runs, tmp_path):
    old, _, names = runs
    other, _ = write_run(tmp_path / "other", WORSE, references=[f"{text} today" for text in REFERENCES])
    regressions = check_rules(compare_runs(read_runs([old, other])), ["bleu drops 90"])
    assert not any(isinstance(regression, Regression) for regression in regressions)
    reasons = {regression.step: regression.reason for regression in regressions}
    assert (reasons[names[1]], reasons[names[0]]) == ("other-examples", "no-reference-statistics")
    assert len(reasons) == len(names)


def test_times_of_different_machines_are_compared_by_speedup_only(runs):
    old, new, names = runs
    report = json.loads((new / "report.json").read_text())
    report["environment"]["cpu"] = "another"
    (new / "report.json").write_text(json.dumps(report))
    comparison = compare_runs(read_runs([old, new]))
    assert [
        regression.reason for regression in check_rules(comparison, [f"latency rises 10% at {names[1]}"])
    ] == ["other-machine"]
    assert check_rules(comparison, [f"speedup drops 10% at {names[1]}"]) == []


@pytest.mark.parametrize(("rule", "code"), [
    ("bleu falls 1", "wrong-rule"), ("bleuu drops 1", "wrong-rule"), ("bleu drops", "wrong-rule"),
    ("bleu drops 1 at nowhere", "nothing-to-compare"), ("accuracy drops 1", "nothing-to-compare"),
])  # fmt: skip
def test_invalid_rule_is_rejected(runs, rule, code):
    with raises_code(code, InputError):
        check_rules(compare_runs(read_runs(runs[:2])), [rule])


def test_incomparable_runs_are_rejected(runs, tmp_path):
    old, new, names = runs
    other, _ = write_run(tmp_path / "summary", REFERENCES, task="summarization")
    with raises_code("other-task", InputError):
        read_runs([old, other])
    with raises_code("too-few-runs", InputError):
        read_runs([old])
    (tmp_path / "search.json").write_text("{}")
    with raises_code("missing-file", InputError):
        read_runs([old, tmp_path])
    scores = new / SCORES_FOLDER / f"{names[1]}.json.gz"
    content = scores.read_bytes()
    for damaged in (b"no gzip", content[:10] + b"\xff" * 20 + content[30:]):
        scores.write_bytes(damaged)
        with raises_code("damaged-file", InputError):
            compare_runs(read_runs([old, new]))
    (new / "report.json").write_text("{")
    with raises_code("damaged-file", InputError):
        read_runs([old, new])


def test_renderings_contain_numbers_and_escape_names(tmp_path):
    old, names = write_run(tmp_path / "old", REFERENCES)
    untrusted_run, _ = write_run(tmp_path / "<script>|", WORSE)
    comparison = compare_runs(read_runs([old, untrusted_run]))
    page, text, table = (
        comparison_html(comparison),
        comparison_text(comparison, 80),
        comparison_markdown(comparison),
    )
    value = f"{entry(comparison, names[1])[1]['quality']['bleu']['value']:.2f}"
    assert all(value in rendering for rendering in (page, text, table))
    assert "<script>" not in page + table
    assert max(map(len, text.splitlines()[: len(comparison["steps"])])) <= 80


@pytest.mark.parametrize(("name", "code"), [("c.svg", None), ("c.pdf", "wrong-suffix")])
def test_chart_file_is_written_or_rejected(runs, name, code):
    comparison = compare_runs(read_runs(runs[:2]))
    if code:
        with raises_code(code, InputError):
            comparison_plot(comparison, Path(name))
        return
    root = ET.fromstring(comparison_plot(comparison, Path(name)))
    assert {"old", "new", runs[2][1]} <= {text.text for text in root.iter(f"{{{SVG}}}text")}
    for step in comparison["steps"]:
        for run in filter(None, step["runs"]):
            run["quality"] = {}
    with raises_code("nothing-to-draw", InputError):
        comparison_plot(comparison, Path(name))
    assert "<svg" not in comparison_html(comparison)


def test_command_exits_with_3_on_regression(runs, tmp_path):
    old, new, names = runs
    page = tmp_path / "c.html"
    rule = ("--fail-if", "bleu drops 0.5")
    result = harness.smelt("compare", old, new, "--json", "--html", page, *rule, code=3)
    content = json.loads(result.stdout)
    assert content["reference"] == "old"
    assert {entry["step"] for entry in content["regressions"]} >= {names[1]}
    assert page.read_text().count("<svg") == 2
    picture = tmp_path / "c.png"
    harness.smelt("compare", old, new, "--fail-if", f"bleu drops 99 at {names[1]}", "--plot", picture, code=0)
    assert picture.read_bytes().startswith(b"\x89PNG")
    change_step(new, names[1], skip)
    result = harness.smelt("compare", old, new, "--json", "--fail-if", f"size rises 5% at {names[1]}", code=3)
    content = json.loads(result.stdout)
    assert [entry["reason"] for entry in content["not_judged"]] == ["no-step"]
    assert content["regressions"] == []
    harness.smelt("compare", old, code=2)
