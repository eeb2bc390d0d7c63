"""Rows and numbers as every drawing shows them."""

import re

import pytest

from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html, render_table
from smelt.evaluate.report.schema import validate_report
from smelt.evaluate.report.step_schema import ScoreDifference
from smelt.evaluate.report.view import (
    difference_interval_text,
    difference_text,
    is_significant,
    number_text,
    p_value_text,
    signed_text,
    significant_digits,
    status_text,
    tree_rows,
)
from tests.support.standins.sample_report import HtmlOutline, ten_step_report

pytestmark = pytest.mark.quick


@pytest.fixture
def report():
    return ten_step_report()


def test_tree_draws_branches_and_does_not_indent_chains(report):
    tree_lines = [row.branch + row.step.name for row in tree_rows(validate_report(report))]
    assert tree_lines == [
        "model",
        "├─ control",
        "└─ distill",
        "   prune",
        "   small",
        "   ├─ quantize",
        "   │  onnx-int8",
        "   ├─ onnx-fp32",
        "   │  engine",
        "   └─ openvino",
    ]


def test_run_without_gates_is_finished_not_passed(report):
    """A page that recommends nothing must not say "passed"."""
    report["status"] = "passed"
    assert status_text(validate_report(report)) == "passed"
    for step in report["steps"]:
        step["gates"] = []
        step.get("test", {})["gates"] = []
    assert status_text(validate_report(report)) == "finished"
    report["status"] = "interrupted"
    assert status_text(validate_report(report)) == "interrupted"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "p = 0.012"), (0.0499, "p = 0.0499"), (0.04996, "p = 0.04996"), (0.05, "p = 0.050"),
        (0.0502, "p = 0.050"), (1.0, "p = 1.000"), (0.001, "p = 0.001"),
    ],
)  # fmt: skip
def test_significant_p_value_is_not_rounded_to_insignificant(value, text):
    assert p_value_text(value) == text


@pytest.mark.parametrize(("difference", "ends", "p_value", "text", "brackets"), [
    (-0.0034, (-0.0061, -0.0012), 0.01, "−0.003", "[−0.006, −0.001]"),
    (-0.0014, (-0.0023, -0.0003), 0.0496, "−0.0014", "[−0.0023, −0.0003]"),
    (-0.0034, (-0.0061, 0.0012), 0.3, "0.00", "[−0.01, 0.00]"),
    (-1.25, (-2.0, -0.3), 0.01, "−1.25", "[−2.00, −0.30]"),
    (-1.25, (-2.5, 0.0), 0.01, "−1.25", "[−2.50, 0.00]"),  # a zero that is one
    (1e-9, (1e-10, 1e-8), 0.01, "0.00", "[0.00, 0.00]"),  # the last digit of a float
    (-1.25, None, 0.2, "−1.25", ""),
])  # fmt: skip
def test_significant_difference_is_not_shown_as_zero(difference, ends, p_value, text, brackets):
    score_difference = ScoreDifference(difference=difference, ci95=ends, p_value=p_value)
    assert difference_text(score_difference, "bleu") == text
    assert difference_interval_text(score_difference, "bleu") == brackets
    assert difference_text(None, "bleu") == "–"


def test_difference_of_zero_has_no_star():
    assert is_significant(ScoreDifference(difference=-0.000001, ci95=None, p_value=0.001))
    assert not is_significant(ScoreDifference(difference=-4e-7, ci95=None, p_value=0.001))
    assert not is_significant(ScoreDifference(difference=-0.5, ci95=None, p_value=0.2))
    # as in the verdict, so that a step is not worse there and equal in the tables
    assert is_significant(ScoreDifference(difference=-0.5, ci95=None, p_value=0.01, p_value_holm=0.06))


def test_score_without_interval_has_no_brackets(report):
    for report_step in report["steps"]:
        for part in ("quality", "against_baseline", "against_parent"):
            for entry in report_step[part].values():
                entry["ci95"] = None
    for rendering in (render_html(report), render_markdown(report), render_table(report)):
        assert "37.05" in rendering
        assert not re.search(r"None|null|\d \[\]|, ,|\d ,|interval ,|>, p", rendering)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "0.01"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (12345, "12,345")]
)
def test_significant_digits(value, text):
    assert significant_digits(value) == text
    assert number_text(float(value), 0) == f"{value:,.0f}"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0.00"), (-0.001, "0.00"), (-1.5, "−1.50"), (1.5, "+1.50"), (1234.5, "+1,234.50")],
)
def test_signed_numbers(value, text):
    assert signed_text(value) == text


def test_tiny_p_values_are_not_shown_as_zero(report):
    report["steps"][6]["against_parent"]["bleu"]["p_value"] = 1e-7
    text = " ".join(HtmlOutline(render_html(report)).texts)
    assert "p < 0.001" in text
    assert "p = 0.000" not in text
