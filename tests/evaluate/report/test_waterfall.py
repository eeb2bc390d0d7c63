"""Changes of quality, latency and size with each stage."""

import re
import xml.etree.ElementTree as ET

import pytest

from smelt.evaluate.report.chart import WATERFALL_NARROW, WATERFALL_WIDE, find_waterfall, waterfall_figure
from smelt.evaluate.report.drawing import page_svg
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html
from smelt.evaluate.report.schema import validate_report
from tests.support.standins.sample_report import HtmlOutline, mark_disturbed, ten_step_report, with_verdict

pytestmark = pytest.mark.quick

CHAIN = ("model", "distill", "prune", "small", "quantize", "onnx-int8")


@pytest.fixture
def report():
    """The sample; onnx-int8, which its gate accepts, continues from a step that is not timed."""
    found = ten_step_report()
    found["steps"][6]["gates"][0]["passed"] = True
    found["steps"][5]["latency"] = []
    return with_verdict(found)


def _waterfall(report):
    return find_waterfall(validate_report(report))


def test_the_changes_of_the_chain_sum_up_to_its_last_step(report):
    rows = _waterfall(report).rows
    steps = [next(step for step in report["steps"] if step["name"] == name) for name in CHAIN]
    assert tuple(row.step.name for row in rows) == CHAIN
    expected = [
        [step["quality"]["bleu"]["value"] for step in steps],
        [100 / step["latency"][0]["speedup"] if step["latency"] else None for step in steps],
        [step["size_bytes"] / 1e6 for step in steps],
    ]
    for at, values in enumerate(expected):
        changes = [row.changes[at] for row in rows]
        assert [change and change.after for change in changes] == values
        measured = [change for change in changes if change]
        assert [change.before for change in measured] == [None, *(c.after for c in measured[:-1])]
        steps_down = sum(change.after - change.before for change in measured[1:])
        assert values[0] + steps_down == pytest.approx(values[-1])
    assert rows[4].changes[1] is None
    assert [rows[1].changes[at].text for at in range(3)] == ["−0.46*", "−37 %", "−24.2"]
    assert [rows[1].changes[at].is_better for at in range(3)] == [False, True, True]
    assert [rows[5].changes[2].text, rows[5].changes[2].is_better] == ["+0.70", False]


def test_a_star_is_the_paired_test_against_the_step_before(report):
    step = report["steps"][3]
    step["against_parent"]["bleu"] = {"difference": -0.45, "ci95": [-1.0, 0.1], "p_value": 0.06}
    assert _waterfall(report).rows[2].changes[0].text == "−0.45"
    step["quality"]["bleu"]["value"] = report["steps"][2]["quality"]["bleu"]["value"] - 0.004
    step["against_parent"]["bleu"] = {"difference": -0.004, "ci95": [-0.006, -0.001], "p_value": 0.01}
    assert _waterfall(report).rows[2].changes[0].text == "−0.004*"  # not 0.00
    step["against_parent"]["bleu"]["p_value"] = 0.06
    step["quality"]["bleu"]["value"] = report["steps"][2]["quality"]["bleu"]["value"]
    same = _waterfall(report).rows[2].changes[0]
    assert (same.text, same.is_better) == ("0.00", None)


def test_cpu_time_takes_the_place_of_a_disturbed_clock_if_all_steps_have_it(report):
    for number in (0, 3):
        mark_disturbed(report["steps"][number]["latency"][0])
    marked = [row.changes[1] and row.changes[1].text.endswith(" ?") for row in _waterfall(report).rows]
    assert marked == [False, False, True, False, None, False]  # quantize is not timed
    for step in report["steps"][2:7]:
        for row in step["latency"]:
            row["cpu_speedup"] = 4.0
    found = _waterfall(report)
    assert "CPU time" in found.titles[1]
    changes = [row.changes[1] for row in found.rows if row.changes[1]]
    assert [change.after for change in changes] == [100, *[25] * (len(changes) - 1)]
    assert not any("?" in change.text for change in changes)


@pytest.mark.parametrize(
    ("verdict", "last"),
    [
        ({"closest": "onnx-fp32", "step": None}, "onnx-fp32"),
        ({"step": "control"}, "control"),
        (None, "onnx-int8"),
    ],
)
def test_the_chain_is_that_of_the_verdict_else_the_longest(report, verdict, last):
    report["verdict"] = verdict and report["verdict"] | verdict
    assert _waterfall(report).rows[-1].step.name == last


def test_without_a_second_step_nothing_is_compared(report):
    report |= {"steps": report["steps"][:1], "pareto_front": [], "verdict": None}
    assert _waterfall(report) is None


@pytest.mark.parametrize("layout", [WATERFALL_WIDE, WATERFALL_NARROW])
def test_the_drawing_has_every_step_and_change_in_its_place(report, layout):
    found = _waterfall(report)
    figure = waterfall_figure(found, layout)
    root = ET.fromstring(page_svg(figure))
    places = {}
    for text in root.iter("text"):
        x, y = (float(v) for v in re.findall(r"-?[\d.]+", text.get("transform"))[-2:])
        places.setdefault(text.text, []).append((x, y))
        length = 6 * len(text.text)
        anchor = re.search(r"text-anchor: (\w+)", text.get("style"))
        left = x - {"start": 0, "middle": length / 2, "end": length}[anchor[1] if anchor else "start"]
        assert 0 <= left <= layout.width - length
        assert 0 <= y <= figure.height
    for name in CHAIN:
        assert len(places[name]) == (3 if layout.stacked else 1)
    heights = [places[name][0][1] for name in CHAIN]
    assert heights == sorted(heights)
    for row in found.rows:
        assert all(change is None or change.text in places for change in row.changes)
    assert len(root.findall(".//title")) == 0


def test_markdown_and_page_have_the_changes_as_a_table(report):
    page, markdown = HtmlOutline(render_html(report)), render_markdown(report)
    assert page.open == []
    section = markdown.split("## Changes by stage")[1]
    assert "| small | factorize | −0.20\\* | −2 % | −11.9 |" in section
    assert "−11.9" in page.texts
    plain = render_html(report, with_charts=False)
    assert '<svg class="' not in plain
    assert "−11.9" in plain
