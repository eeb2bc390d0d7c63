"""Changes of quality, latency and size with each stage."""

import pytest

from smelt.evaluate.report.chart import find_waterfall
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html
from smelt.evaluate.report.schema import validate_report
from tests.support.standins.sample_report import HtmlOutline, mark_disturbed, ten_step_report, with_verdict

pytestmark = pytest.mark.quick

CHAIN = ("model", "distill", "prune", "small", "quantize", "onnx-int8")


@pytest.fixture
def report():
    """The sample; onnx-int8, which its gate accepts, continues from a step that is not timed."""
    sample = ten_step_report()
    sample["steps"][6]["gates"][0]["passed"] = True
    sample["steps"][5]["latency"] = []
    return with_verdict(sample)


def _waterfall(report):
    return find_waterfall(validate_report(report))


def test_changes_of_chain_sum_to_last_step(report):
    waterfall_rows = _waterfall(report).rows
    steps = [next(step for step in report["steps"] if step["name"] == name) for name in CHAIN]
    assert tuple(row.step.name for row in waterfall_rows) == CHAIN
    expected = [
        [step["quality"]["bleu"]["value"] for step in steps],
        [100 / step["latency"][0]["speedup"] if step["latency"] else None for step in steps],
        [step["size_bytes"] / 1e6 for step in steps],
    ]
    for panel_index, values in enumerate(expected):
        changes = [row.changes[panel_index] for row in waterfall_rows]
        assert [change and change.after for change in changes] == values
        measured = [change for change in changes if change]
        assert [change.before for change in measured] == [None, *(c.after for c in measured[:-1])]
        steps_down = sum(change.after - change.before for change in measured[1:])
        assert values[0] + steps_down == pytest.approx(values[-1])
    assert waterfall_rows[4].changes[1] is None
    assert [waterfall_rows[1].changes[panel_index].text for panel_index in range(3)] == [
        "−0.46*",
        "−37 %",
        "−24.2",
    ]
    assert [waterfall_rows[1].changes[panel_index].is_better for panel_index in range(3)] == [
        False,
        True,
        True,
    ]
    assert [waterfall_rows[5].changes[2].text, waterfall_rows[5].changes[2].is_better] == ["+0.70", False]


def test_waterfall_shows_operations_if_a_step_changes_them(report):
    for step in report["steps"]:
        step["operations"] = 2_000_000
    assert _waterfall(report).panels == [0, 1, 2]
    for step in report["steps"][4:]:
        step["operations"] = 1_500_000
    waterfall = _waterfall(report)
    assert waterfall.panels == [0, 1, 2, 3]
    change = waterfall.rows[CHAIN.index("small")].changes[3]
    assert (change.before, change.after, change.is_better) == (2.0, 1.5, True)
    assert "−0.50 |" in render_markdown(report)


def test_star_marks_significant_change_from_previous_step(report):
    step = report["steps"][3]
    step["against_parent"]["bleu"] = {"difference": -0.45, "ci95": [-1.0, 0.1], "p_value": 0.06}
    assert _waterfall(report).rows[2].changes[0].text == "−0.45"
    step["quality"]["bleu"]["value"] = report["steps"][2]["quality"]["bleu"]["value"] - 0.004
    step["against_parent"]["bleu"] = {"difference": -0.004, "ci95": [-0.006, -0.001], "p_value": 0.01}
    assert _waterfall(report).rows[2].changes[0].text == "−0.004*"  # not 0.00
    step["against_parent"]["bleu"]["p_value"] = 0.06
    step["quality"]["bleu"]["value"] = report["steps"][2]["quality"]["bleu"]["value"]
    unchanged = _waterfall(report).rows[2].changes[0]
    assert (unchanged.text, unchanged.is_better) == ("0.00", None)


def test_cpu_time_replaces_disturbed_wall_time_if_all_steps_have_it(report):
    for step_index in (0, 3):
        mark_disturbed(report["steps"][step_index]["latency"][0])
    marked = [row.changes[1] and row.changes[1].text.endswith(" ?") for row in _waterfall(report).rows]
    assert marked == [False, False, True, False, None, False]  # quantize is not timed
    for step in report["steps"][2:7]:
        for row in step["latency"]:
            row["cpu_speedup"] = 4.0
    waterfall = _waterfall(report)
    assert "CPU time" in waterfall.titles[1]
    changes = [row.changes[1] for row in waterfall.rows if row.changes[1]]
    assert [change.after for change in changes] == [100, *[25] * (len(changes) - 1)]
    assert not any("?" in change.text for change in changes)


@pytest.mark.parametrize(("verdict", "last"), [
    ({"closest": "onnx-fp32", "step": None}, "onnx-fp32"), ({"step": "control"}, "control"),
    (None, "onnx-int8"),
])  # fmt: skip
def test_chain_ends_at_recommended_step_or_is_longest(report, verdict, last):
    report["verdict"] = verdict and report["verdict"] | verdict
    assert _waterfall(report).rows[-1].step.name == last


def test_single_step_has_no_waterfall(report):
    report |= {"steps": report["steps"][:1], "pareto_front": [], "verdict": None}
    assert _waterfall(report) is None


def test_markdown_and_html_contain_changes_table(report):
    page, markdown = HtmlOutline(render_html(report)), render_markdown(report)
    assert page.open == []
    section = markdown.split("## Changes by stage")[1]
    assert "| small | factorize | −0.20\\* | −2 % | −11.9 |" in section
    assert "−11.9" in page.texts
    chartless_page = render_html(report, with_charts=False)
    assert '<svg class="' not in chartless_page
    assert "−11.9" in chartless_page
