"""What a run says at its end."""

import json
import re
import shlex

import pytest
import sample_report

from smelt.evaluate.report.schema import pareto_front
from smelt.pipeline.execute.run_result import (
    Result,
    deployment_notes,
    smallest_deployable_step,
    summary_lines,
)


def step(name, size, format_="onnx", target="ort-cpu", artifact="a"):
    where = {"format": format_, "target": target, "artifact": artifact}
    return {"name": name, "size_bytes": size, "quality": {}, "against_baseline": {}} | where


@pytest.mark.parametrize(
    ("steps", "frontier", "expected"),
    [
        ([step("a", 9), step("b", 5), step("c", 7)], [], "b"),
        ([step("a", 9), step("b", 5), step("c", 7)], ["a", "c"], "c"),
        ([step("a", 9), step("b", 5, target="openvino"), step("c", 7, "torch", None)], ["b", "c"], "a"),
        ([step("a", 9), step("b", 5, artifact=None)], [], "a"),
        ([step("c", 7, "torch", None), step("d", 7, "tensorrt")], ["c"], None),
    ],
)
def test_the_step_to_ship_is_small_worth_having_and_runs_anywhere(steps, frontier, expected):
    assert smallest_deployable_step({"steps": steps, "frontier": frontier}) == expected


def judged(name, size, value, p_value, higher=True, difference=-1.0):
    score = {"value": value, "higher_is_better": higher}
    against = {"difference": difference, "p_value": p_value}
    return step(name, size) | {"quality": {"m": score}, "against_baseline": {"m": against}}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (
            [judged("whole", 9, 38.2, 1.0), judged("bad", 2, 31.3, 0.002), judged("good", 5, 38.0, 0.6)],
            "good",
        ),
        ([judged("better", 9, 39.2, 0.01, difference=1.0), judged("bad", 2, 31.3, 0.002)], "better"),
        ([judged("bad", 9, 35.0, 0.01), judged("worst", 2, 0.02, 0.002)], "bad"),
        ([judged("bad", 2, 99.0, 0.01, False, 9.0), judged("good", 9, 80.0, 0.01, False, -9.0)], "good"),
        ([judged("bad", 2, 99.0, 0.01, False, 9.0), judged("less", 9, 95.0, 0.01, False, 5.0)], "less"),
    ],
)
def test_without_times_what_is_significantly_worse_is_not_named(steps, expected):
    assert smallest_deployable_step({"steps": steps, "frontier": []}) == expected
    assert smallest_deployable_step({"steps": steps, "frontier": [steps[0]["name"]]}) == steps[0]["name"]


def test_a_step_that_fails_a_gate_is_named_only_where_all_do():
    steps = [judged("whole", 9, 38.2, 1.0), judged("fails", 2, 38.0, 0.6), judged("good", 5, 38.1, 0.7)]
    steps[1]["gates"], steps[2]["gates"] = [{"passed": True}, {"passed": False}], [{"passed": None}]
    assert smallest_deployable_step({"steps": steps, "frontier": []}) == "good"
    assert smallest_deployable_step({"steps": steps, "frontier": ["whole", "fails"]}) == "whole"
    assert smallest_deployable_step({"steps": steps[1:2], "frontier": []}) == "fails"


def test_a_loss_that_a_gate_allows_keeps_no_step_from_being_shipped():
    steps = [judged("whole", 9, 100.0, 1.0), judged("int8", 3, 99.9, 0.002)]
    assert smallest_deployable_step({"steps": steps, "frontier": []}) == "whole"
    steps[1]["gates"] = [{"metric": "m", "passed": True}]
    assert smallest_deployable_step({"steps": steps, "frontier": []}) == "int8"
    steps[1]["gates"] = [{"metric": "size_mb", "passed": True}]
    assert smallest_deployable_step({"steps": steps, "frontier": []}) == "whole"


def agreeing(name, size, **differences):
    scores = {
        metric: {"value": 1.0, "higher_is_better": metric != "relative_error"} for metric in differences
    }
    tests = {metric: {"difference": value, "p_value": 0.001} for metric, value in differences.items()}
    return step(name, size) | {"quality": scores, "against_baseline": tests}


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ({"agreement": -0.3}, "int8"),
        ({"agreement": -1.2}, "whole"),
        ({"agreement": -0.3, "top1": -8.0}, "whole"),
        ({"agreement": -0.3, "relative_error": 4.0}, "int8"),
        ({"relative_error": 4.0}, "whole"),
        ({"relative_error": 0.5}, "int8"),
        ({"accuracy": -0.3}, "whole"),  # the baseline is not right by definition
    ],
)
def test_a_little_less_agreement_than_with_itself_keeps_no_step_from_being_shipped(differences, expected):
    whole = agreeing("whole", 9, **dict.fromkeys(differences, 0.0))
    assert (
        smallest_deployable_step({"steps": [whole, agreeing("int8", 3, **differences)], "frontier": []})
        == expected
    )
    failed = agreeing("int8", 3, **differences) | {"gates": [{"metric": "agreement", "passed": False}]}
    assert smallest_deployable_step({"steps": [whole, failed], "frontier": []}) == "whole"


def test_disturbed_times_name_what_a_run_without_times_would():
    steps = [judged("onnx", 9, 38.2, 1.0), judged("bad", 2, 31.3, 0.002), judged("good", 5, 38.0, 0.6)]
    row = {"batch_size": 1, "speedup": 1.0}
    for one, stable in zip(steps, (True, False, False), strict=True):
        one["latency"] = [{**row, "stable": stable}]
    assert smallest_deployable_step({"steps": steps, "frontier": pareto_front(steps, "onnx")}) == "good"


def test_the_end_names_the_commands_that_try_and_ship_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = sample_report.ten_step_report()
    name = smallest_deployable_step(report)
    assert name is not None
    result = Result(report, tmp_path / "runs" / "my run")
    place = shlex.quote(f"runs/my run/artifacts/{name}")
    assert summary_lines(result)[-2:] == [
        f'Try it: smelt predict {place} "TEXT"',
        f"Ship it: smelt package {place}",
    ]
    # of gates that nobody has judged nothing is said to be shipped
    stopped = summary_lines(Result(report | {"status": "interrupted"}, result.folder))
    assert stopped[-1].startswith("Report: ")


FEW, WORSE = "too-few-examples", "significantly-worse"


@pytest.mark.parametrize(
    ("metric", "value", "difference", "ends", "p_value", "n", "code", "change"),
    [
        ("bleu", 29.7, -7.5, [-16.0, 1.0], 0.09, 30, FEW, "BLEU −7.50 [−16.00, 1.00]"),
        ("bleu", 37.0, -0.4, [-1.5, 0.4], 0.4, 30, None, ""),  # four of a hundred
        ("bleu", 45.0, 7.6, [-2.0, 16.0], 0.09, 30, FEW, "BLEU +7.60 [−2.00, 16.00]"),
        ("bleu", 37.0, -2.4, [-4.0, -0.9], 0.01, 30, WORSE, "BLEU −2.40 [−4.00, −0.90], p = 0.010"),
        ("bleu", 37.0, 0.0, [0.0, 0.0], 1.0, 2, FEW, "BLEU 0.00 [0.00, 0.00]"),  # drawn from two
        ("bleu", 37.0, 0.0, [0.0, 0.0], 1.0, 20, None, ""),
        ("perplexity", 95.0, 9.0, [-1.0, 19.0], 0.09, 90, FEW, "+9.00 [−1.00, 19.00]"),
        ("bleu", 37.0, -0.4, [-0.5, -0.3], 0.25, 30, FEW, "BLEU −0.40 [−0.50, −0.30]"),
        ("bleu", 37.0, 0.4, [0.3, 0.5], 0.25, 30, None, ""),
        ("bleu", 37.0, -0.4, None, 0.25, 500, FEW, "BLEU −0.40"),
        ("bleu", 37.0, -0.004, [-0.006, -0.001], 0.01, 500, WORSE, "BLEU −0.004 [−0.006, −0.001], p = 0.010"),
        ("perplexity", 77.0, -9.0, [-19.0, 1.0], 0.09, 90, None, ""),  # lower is better: one more of 86
    ],
)
def test_a_step_is_named_with_what_it_loses_or_what_few_rows_leave_open(
    tmp_path, metric, value, difference, ends, p_value, n, code, change
):
    report = sample_report.ten_step_report()
    name = smallest_deployable_step(report)
    chosen = next(one for one in report["steps"] if one["name"] == name)
    score = chosen["quality"]["bleu"] | {"value": value, "n": n, "higher_is_better": metric == "bleu"}
    chosen["quality"] = {metric: score}
    chosen["against_baseline"] = {metric: {"difference": difference, "ci95": ends, "p_value": p_value}}
    report["frontier"] = [name]
    lines = summary_lines(Result(report, tmp_path))
    printed = lines[lines.index(f"Report: {tmp_path / 'report.html'}") + 1 : -2]
    notes = deployment_notes(report, name)
    if code is None:
        assert (notes, printed) == ([], [])
        return
    assert [note.code for note in notes] == [code]
    assert " ".join(printed) == notes[0].message.replace("\N{NO-BREAK SPACE}", " ")
    assert all(value in " ".join(printed) for value in (name, "model", change))
    assert max(map(len, printed)) <= 80
    if code == WORSE:
        failed = {"metric": metric, "passed": False, "kind": "min", "limit": 39.0, "value": value}
        chosen["gates"] = [failed, failed | {"passed": True}]
        assert [note.code for note in deployment_notes(report, name)] == ["gate-failed", WORSE]
        chosen["gates"] = [{"metric": metric, "passed": True, "kind": "max_drop", "limit": 3.0, "value": 2.4}]
        (allowed,) = deployment_notes(report, name)
        assert allowed.code == "accepted-loss"
        assert change in allowed.message.replace("\N{NO-BREAK SPACE}", " ")
    assert summary_lines(Result(report | {"status": "interrupted"}, tmp_path))[-1].startswith("Report: ")


@pytest.mark.parametrize("more", range(0, 20, 2))
def test_an_interval_stays_in_one_line(tmp_path, more):
    report = sample_report.ten_step_report()
    name = smallest_deployable_step(report)
    report = json.loads(json.dumps(report).replace(f'"{name}"', f'"{name}{"x" * more}"'))
    lines = summary_lines(Result(report, tmp_path))
    assert [line for line in lines if re.search(r"−1\.11 \[.+\],", line)], lines


def test_graphs_that_generate_and_were_taken_are_shipped_in_a_form_that_takes_them(tmp_path):
    report = sample_report.ten_step_report()
    for one in report["steps"]:
        one["details"] = {"foreign": True}
    assert report["recipe"]["task"] == "translation"
    assert summary_lines(Result(report, tmp_path))[-1].endswith(" --format optimum")
    report["recipe"]["task"] = "text-classification"
    assert "--format" not in summary_lines(Result(report, tmp_path))[-1]
