"""The page: whole in itself, well formed, safe from what strangers wrote."""

import re

import pytest

from smelt.evaluate.report.render import render_html
from smelt.evaluate.report.view import significant_digits
from tests.support.standins.sample_report import HtmlOutline, ten_step_report

pytestmark = pytest.mark.quick


@pytest.fixture
def report():
    return ten_step_report()


def test_html_has_no_external_resources_and_is_small(report):
    text = render_html(report)
    assert not re.search(r"https?:|//\w|url\(|@import|<script|<link|<img|<iframe|\bsrc=", text)
    assert "default-src 'none'" in text
    assert len(text.encode()) < 120_000


def test_html_is_well_formed_and_contains_numbers(report):
    outline = HtmlOutline(render_html(report))
    assert outline.open == []
    assert "time to first token" in outline.texts
    text = " ".join(outline.texts)
    for report_step in report["steps"]:
        assert report_step["name"] in text
        for score in report_step["quality"].values():
            assert f"{score['value']:.2f}" in text
            assert f"[{score['ci95'][0]:.2f}, {score['ci95'][1]:.2f}]" in text
        for entry in report_step["latency"]:
            assert f"{entry['speedup']:.2f}×" in text
            assert significant_digits(entry["p50_ms"]) in text
    small, engine, openvino = (report["steps"][i] for i in (4, 8, 9))
    for message in (engine["reason"], openvino["error"]["message"], small["warnings"][0]["message"]):
        assert message in text
    assert "None" not in text
    assert "null" not in text


def test_html_marks_only_significant_differences(report):
    text = render_html(report)
    assert re.search(r'class="bad"[^>]*>−0\.91<abbr', text)  # prune, p = 0.002
    report["steps"][3]["against_baseline"]["bleu"]["p_value"] = 0.5
    assert re.search(r'class="even"[^>]*>−0\.91</span>', render_html(report))


def test_html_table_shows_bits_per_weight_of_quantized_steps(report):
    assert "per weight" not in render_html(report)
    report["steps"][5]["details"] = {"bits_per_weight": 4.503}
    text = render_html(report)
    assert "Bits<br>per weight</th>" in text
    cells = re.findall(r'data-label="bits per weight">([^<]*)</td>', text)
    assert cells == ["–"] * 5 + ["4.503"] * 2 + ["–"]  # codes stay codes in the graph
    # a row that was not measured spans the columns that are always there, and fills those that may be hidden
    [head] = [head for head in re.findall(r"<thead>.*?</thead>", text, re.DOTALL) if "Bits" in head]
    hidden = re.findall(r'class="(minor[^"]*)"', head)
    assert len(hidden) == 2
    for row in re.findall(r'<tr class="out">.*?</tr>', text, re.DOTALL):
        assert 'colspan="7"' in row  # two of the metric, two of each batch size, the size
        assert re.findall(r'class="(minor[^"]*) empty"', row) == hidden
