"""The report's schema and its three drawings, on a sample with branches, a skipped step and a failed one."""

import copy
import re

import pytest

from smelt.evaluate.report.chart import scatter_chart
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html, render_table
from smelt.evaluate.report.schema import validate_report
from tests.support.standins import sample_report
from tests.support.standins.sample_report import HtmlOutline, make_message, mark_disturbed, ten_step_report


@pytest.fixture
def report():
    return ten_step_report()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_reports_of_failed_runs_are_rendered(report, num_steps):
    report["steps"] = report["steps"][:num_steps]
    for report_step in report["steps"]:
        report_step.update(
            status="error",
            error=make_message("broke", severity="error"),
            quality={},
            latency=[],
            size_bytes=None,
        )
    report.update(status="error", baseline="model" if num_steps else None, pareto_front=[])
    assert HtmlOutline(render_html(report)).open == []
    assert "error" in render_markdown(report)
    assert render_table(report).startswith("Status: error.")


def cells_of(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_latency_error_of_a_finished_step_is_shown(report):
    report["steps"][3]["error"] = make_message("latency: the process was killed", severity="error")
    for rendering in (render_table(report), render_markdown(report), render_html(report)):
        assert "the process was killed" in rendering
        assert "made-up" not in rendering  # its text, and not the object


def test_warnings_and_infos_are_rendered_with_locations(report):
    report["warnings"] = [
        make_message("of the run") | {"step": "small", "file": "recipe.yaml", "line": 7},
        make_message("for your information", severity="info"),
    ]
    report["steps"][4]["warnings"] = [make_message("of a step") | {"file": "rows.tsv", "line": 3}]
    for rendering in (render_table(report), render_markdown(report).replace("\\", ""), render_html(report)):
        flat = " ".join(HtmlOutline(rendering).texts if rendering.startswith("<!") else rendering.split())
        assert "recipe.yaml:7: small: of the run" in flat
        assert "rows.tsv:3: of a step" in flat
        assert "info" in flat[: flat.index("for your information")]
        assert not any(hidden_text in flat for hidden_text in ("made-up", "severity", "Message("))


@pytest.fixture
def unscored():
    return sample_report.report_with_unscored_step()


def test_unscored_engine_shows_reason_in_every_rendering(unscored):
    reason = unscored["steps"][8]["reason"]
    text = " ".join(HtmlOutline(render_html(unscored)).texts)
    assert "not scored" in text
    assert f": gate BLEU at most 1.00 worse: {reason}" in text
    assert "skipped" not in text
    markdown = render_markdown(unscored)
    engine_rows = [
        cells_of(line) for line in markdown.splitlines() if "engine" in line and line.startswith("|")
    ]
    [step_row] = [row for row in engine_rows if "tensorrt · tensorrt" in row]
    assert step_row[2:6] == ["tensorrt · tensorrt", "done", "–", "–"]
    gate_rows = [row for row in engine_rows if len(row) == 5]
    assert [row[4] for row in gate_rows] == ["**not judged**", "passed"]
    assert f"- **engine** not scored: {reason}" in markdown
    rendering = render_table(unscored)
    assert next(line for line in rendering.splitlines() if "engine" in line).split()[-5:] == ["–"] * 4 + [
        "40.0"
    ]
    flat = " ".join(rendering.split())
    assert "'engine': gate not judged: BLEU – (at most 1.00 worse)" in flat
    assert f"'engine': not scored: {reason}" in flat


def test_disturbed_times_are_marked_in_every_rendering(report):
    mark_disturbed(report["steps"][6]["latency"][0])
    report["steps"][6]["gates"] = []
    text = " ".join(HtmlOutline(render_html(report)).texts)
    assert "5.94× ?" in text
    markdown = render_markdown(report)
    assert "5.94×?" in markdown
    assert "onnx-int8 (batch 1)" in markdown
    rendering = render_table(report)
    assert "5.94×?" in rendering
    assert re.search(r"[ \n]\?: ", rendering.split("5.94×?")[1])  # explained below the table
    (point,) = (p for p in scatter_chart(validate_report(report)).points if p.name.startswith("onnx-int8"))
    assert (point.name, point.competes) == ("onnx-int8 ?", False)


def test_terminal_shows_shared_unscored_reason_once(unscored):
    other = copy.deepcopy(unscored["steps"][8]) | {"name": "second", "gates": []}
    unscored["steps"].append(other)
    flat = " ".join(render_table(unscored).split())
    assert f"'engine', 'second': not scored: {other['reason']}" in flat
    assert flat.count(f"not scored: {other['reason']}") == 1
    other["reason"] = "a reason of its own"
    flat = " ".join(render_table(unscored).split())
    assert "'engine': not scored: " in flat
    assert "'second': not scored: a reason of its own" in flat
