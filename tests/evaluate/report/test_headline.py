"""What stands first in every drawing of a report."""

import re

import pytest
from sample_report import mark_disturbed, ten_step_report

from smelt.evaluate.report.headline import headline, headline_lines
from smelt.evaluate.report.render import render_html, render_markdown, render_table
from smelt.evaluate.report.schema import validate_report


@pytest.fixture
def report():
    found = ten_step_report()
    found["steps"][6]["gates"] = []  # of onnx-int8: it fails one
    return found


def _headline(report):
    return headline(validate_report(report))


def _everywhere(report, words):
    flat = [
        " ".join(text.split())
        for text in (render_table(report), render_markdown(report), render_html(report))
    ]
    return [words in text.replace("\\", "") for text in flat]


def _rounds(*speedups):
    idle = {"counted": False, "processor_share": 1.0, "baseline_processor_share": 1.0, "lost_share": 0.4}
    idle |= {"baseline_ms": 100.0, "other_processors": 0.5, "cpu_steal": 0.0, "pressure": None}
    return [idle | {"speedup": one} for one in speedups]


def test_the_fastest_step_that_can_be_deployed_is_named(report):
    found = _headline(report)
    assert (found.recommended.name, found.times.batch_size, found.withheld, found.trial) == (
        *("onnx-int8", 1, None),
        None,
    )
    (line,) = headline_lines(validate_report(report))
    assert line == (
        "Fastest step: onnx-int8, 5.94× [5.70, 6.23] at batch 1; BLEU 37.05 (−1.37, p = 0.002);"
        " 25.1 MB (19 % of model)."
    )
    assert " ".join(render_table(report).split()).startswith(line)
    assert line in render_markdown(report).replace("\\", "")
    assert "<b>onnx-int8</b>" in render_html(report)


def test_a_faster_step_that_nobody_would_deploy_is_not_named(report):
    report["steps"][5]["latency"][0]["speedup"] = 99.0  # quantize, which torch only emulates
    report["steps"][5]["latency"][0]["speedup_ci95"] = [98.0, 100.0]
    assert _headline(report).recommended.name == "onnx-int8"


def test_a_step_that_fails_a_gate_is_not_named(report):
    report["steps"][6]["gates"] = ten_step_report()["steps"][6]["gates"]
    assert _headline(report).recommended.name == "onnx-fp32"
    assert "onnx-fp32" in headline_lines(validate_report(report))[0]
    for step in report["steps"]:
        step["gates"] = report["steps"][6]["gates"]
    found = _headline(report)
    assert (found.recommended, found.likely) == (None, None)
    assert found.withheld


def test_no_speed_is_claimed_when_the_times_of_a_step_that_competes_were_disturbed(report):
    mark_disturbed(report["steps"][7]["latency"][0])  # onnx-fp32, not the fastest
    report["steps"][7]["latency"][0]["rounds"] = _rounds(*(1.9, 6.0, 2.0) * 3)
    found = _headline(report)
    assert found.recommended is None
    assert (found.likely, report["steps"][7]["latency"][0]["reason"] in found.withheld) == (None, True)
    assert _everywhere(report, found.withheld) == [True] * 3


@pytest.mark.parametrize(
    ("speedups", "named"), [((1.9, 3.1, 5.6), True), ((1.9, 3.1, 5.7), False), ((None, None), False)]
)
def test_a_disturbed_step_withholds_only_where_it_may_be_the_fastest(report, speedups, named):
    row = report["steps"][7]["latency"][0]  # onnx-fp32, compared with onnx-int8's 5.94 [5.70, 6.23]
    mark_disturbed(row)
    row["rounds"] = _rounds(*speedups)
    found = _headline(report)
    assert (found.recommended is not None, found.withheld is None) == (named, named)
    if named:
        assert found.recommended.name == "onnx-int8"


def test_each_reason_is_said_once_when_several_were_disturbed(report):
    for step in (report["steps"][4], report["steps"][6]):
        mark_disturbed(step["latency"][0])
        step["latency"][0]["rounds"] = []
    report["steps"][6]["latency"][0].update(cause="disagree", reason="the rounds disagree")
    found = _headline(report).withheld
    assert f"{report['steps'][4]['name']}, onnx-int8" in found
    assert found.count("other work") == found.count("the rounds disagree") == 1


def test_what_processor_time_knows_is_said_where_the_clock_was_disturbed(report):
    for step, ratio in ((report["steps"][6], 7.0), (report["steps"][7], 2.0)):
        row = step["latency"][0]
        mark_disturbed(row)
        row.update(cpu_speedup=ratio, cpu_speedup_ci95=[ratio - 0.2, ratio + 0.2])
        row["rounds"] = []
    found = _headline(report)
    assert (found.recommended, found.likely.name) == (None, "onnx-int8")
    text = "onnx-int8, about 7.0× [6.80, 7.20] by CPU time at batch 1; BLEU 37.05 (−1.37, p = 0.002)"
    assert found.withheld.startswith(text)
    # what cannot be told from the fastest may be smaller
    report["steps"][7]["latency"][0].update(cpu_speedup=7.4, cpu_speedup_ci95=[7.3, 7.5])
    assert _headline(report).likely.name == "onnx-int8"
    report["steps"][7]["latency"][0].update(cpu_speedup=9.0, cpu_speedup_ci95=[6.0, 13.0])
    assert _headline(report).likely.name == "onnx-int8"
    report["steps"][7]["latency"][0].update(cpu_speedup=9.0, cpu_speedup_ci95=[8.9, 9.1])
    assert _headline(report).likely.name == "onnx-fp32"
    report["steps"][7]["latency"][0].update(cpu_speedup=2.0, cpu_speedup_ci95=[1.9, 2.1])
    assert _everywhere(report, text) == [True] * 3


def test_a_disturbed_step_that_does_not_compete_withholds_nothing(report):
    mark_disturbed(report["steps"][5]["latency"][0])  # quantize
    mark_disturbed(report["steps"][0]["latency"][0])  # the baseline: each pair of rounds was judged by itself
    mark_disturbed(report["steps"][7]["latency"][0])  # onnx-fp32, which fails a gate
    report["steps"][7]["gates"] = ten_step_report()["steps"][6]["gates"]
    assert _headline(report).recommended.name == "onnx-int8"


def test_the_speed_up_at_the_smallest_batch_decides(report):
    for step in report["steps"]:
        step["latency"].reverse()
    report["steps"][7]["latency"][0]["speedup"] = 50.0  # batch 8
    report["steps"][7]["latency"][0]["speedup_ci95"] = [49.0, 51.0]
    assert _headline(report).recommended.name == "onnx-int8"


@pytest.mark.parametrize(
    ("limit", "rows", "count"),
    [
        (64, {"train": 64, "test": 48}, 48),
        (1, {"test": 1}, 1),
        (5000, {"train": 300, "test": 48}, None),  # more than there are: nothing was left out
        (None, {"test": 48}, None),
    ],
)
def test_a_trial_is_called_one_in_every_headline(report, limit, rows, count):
    report["recipe"].update(limit=limit, rows=rows)
    trial = _headline(report).trial
    assert re.findall(r"\d+", trial or "") == ([] if count is None else [str(count)])
    if trial:
        assert _everywhere(report, trial) == [True] * 3


def test_nothing_timed_gives_no_headline(report):
    for step in report["steps"]:
        step["latency"] = []
    report["frontier"] = []
    assert headline_lines(validate_report(report)) == []
    assert render_table(report).startswith("step ")


@pytest.mark.parametrize("timed", [True, False])
def test_of_steps_that_are_all_at_chance_none_is_named_and_the_reason_is_said(report, timed):
    for step in report["steps"]:
        for score in step["quality"].values():
            score["chance"] = score["value"]
        if not timed:
            step["latency"] = []
    found = _headline(report)
    assert found.recommended is None
    assert found.withheld is not None
    assert all(_everywhere(report, found.withheld))
