"""The report's schema and its three drawings, on a sample with branches, a skipped step and a failed one."""

import copy
import re

import pytest

from smelt.evaluate.report.chart import scatter_chart
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html, render_table
from smelt.evaluate.report.schema import (
    validate_report,
)
from tests.support.standins import sample_report
from tests.support.standins.sample_report import HtmlOutline, make_message, mark_disturbed, ten_step_report


@pytest.fixture
def report():
    return ten_step_report()


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_reports_of_failed_runs_can_be_drawn(report, kept):
    report["steps"] = report["steps"][:kept]
    for one in report["steps"]:
        one.update(
            status="error",
            error=make_message("broke", severity="error"),
            quality={},
            latency=[],
            size_bytes=None,
        )
    report.update(status="error", baseline="model" if kept else None, pareto_front=[])
    assert HtmlOutline(render_html(report)).open == []
    assert "error" in render_markdown(report)
    assert "status: error" in render_table(report)


def cells_of(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_latency_error_of_a_finished_step_is_shown(report):
    report["steps"][3]["error"] = make_message("latency: the process was killed", severity="error")
    for drawn in (render_table(report), render_markdown(report), render_html(report)):
        assert "the process was killed" in drawn
        assert "made-up" not in drawn  # its text, and not the object


def test_warnings_and_infos_are_shown_with_their_places_as_texts(report):
    report["warnings"] = [
        make_message("of the run") | {"step": "small", "file": "recipe.yaml", "line": 7},
        make_message("for your information", severity="info"),
    ]
    report["steps"][4]["warnings"] = [make_message("of a step") | {"file": "rows.tsv", "line": 3}]
    for drawn in (render_table(report), render_markdown(report).replace("\\", ""), render_html(report)):
        flat = " ".join(HtmlOutline(drawn).texts if drawn.startswith("<!") else drawn.split())
        assert "recipe.yaml:7: small: of the run" in flat
        assert "rows.tsv:3: of a step" in flat
        assert "info" in flat[: flat.index("for your information")]
        assert not any(word in flat for word in ("made-up", "severity", "Message("))


@pytest.fixture
def unscored():
    return sample_report.report_with_unscored_step()


def test_engine_that_was_not_scored_says_why_in_every_drawing(unscored):
    why = unscored["steps"][8]["reason"]
    text = " ".join(HtmlOutline(render_html(unscored)).texts)
    assert "not scored" in text
    assert f": gate BLEU max_drop 1.00: {why}" in text
    assert "skipped" not in text
    markdown = render_markdown(unscored)
    rows = [cells_of(line) for line in markdown.splitlines() if "engine" in line and line.startswith("|")]
    assert rows[0][2:6] == ["tensorrt · tensorrt", "done", "–", "–"]
    assert [row[3] for row in rows[1:]] == ["**not judged**", "passed"]
    assert f"- **engine** not scored: {why}" in markdown
    drawn = render_table(unscored)
    assert next(line for line in drawn.splitlines() if "engine" in line).split()[-5:] == ["–"] * 4 + ["40.0"]
    flat = " ".join(drawn.split())
    assert "gate not judged at 'engine': BLEU max_drop 1.00 " in flat
    assert f"'engine' is not scored: {why}" in flat


def test_engines_that_were_not_scored_for_one_reason_say_it_once_in_the_terminal(unscored):
    other = copy.deepcopy(unscored["steps"][8]) | {"name": "second", "gates": []}
    unscored["steps"].append(other)
    flat = " ".join(render_table(unscored).split())
    assert f"'engine', 'second' are not scored: {other['reason']}" in flat
    assert flat.count(f"not scored: {other['reason']}") == 1
    other["reason"] = "a reason of its own"
    flat = " ".join(render_table(unscored).split())
    assert "'engine' is not scored: " in flat
    assert "'second' is not scored: a reason of its own" in flat


def test_terminal_has_columns_of_times_where_some_were_taken(report):
    assert "p50 ms  speed-up" in render_table(report)
    assert "diff and speed-up " in render_table(report)
    for step in report["steps"]:
        step["latency"] = []
    drawn = render_table(report)
    head = next(line for line in drawn.splitlines() if line.startswith("step"))
    assert head.split() == ["step", "BLEU", "diff", "MB"]
    assert "\ndiff " in drawn
    assert "speed-up" not in drawn
    markdown, page = render_markdown(report), " ".join(HtmlOutline(render_html(report)).texts)
    assert "ifferences" in markdown
    assert "ifferences" in page
    assert not any(word in page + markdown for word in ("speed-up", "Times are", "quality and speed."))


def test_drawing_leaves_the_report_alone(report):
    before = copy.deepcopy(report)
    render_html(report), render_markdown(report), render_table(report)
    assert report == before


def test_times_that_were_disturbed_are_marked_in_every_drawing(report):
    mark_disturbed(report["steps"][6]["latency"][0])
    report["steps"][6]["gates"] = []
    text = " ".join(HtmlOutline(render_html(report)).texts)
    assert "5.94× ?" in text
    markdown = render_markdown(report)
    assert "5.94×?" in markdown
    assert "onnx-int8 (batch 1)" in markdown
    drawn = render_table(report)
    assert "5.94×?" in drawn
    assert re.search(r"[ \n]\? ", drawn.split("5.94×?")[1])  # explained below the table
    (point,) = (p for p in scatter_chart(validate_report(report)).points if p.name.startswith("onnx-int8"))
    assert (point.name, point.competes) == ("onnx-int8 ?", False)
