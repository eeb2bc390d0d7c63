"""The chart of quality over speed."""

import pytest
from sample_report import STEPS, HtmlOutline, ten_step_report

from smelt.evaluate.report.chart import NARROW_CANVAS, WIDE_CANVAS, scatter_chart
from smelt.evaluate.report.render import render_html
from smelt.evaluate.report.schema import (
    validate_report,
)

pytestmark = pytest.mark.quick


@pytest.fixture
def report():
    return ten_step_report()


@pytest.mark.parametrize("canvas", [WIDE_CANVAS, NARROW_CANVAS])
def test_chart_places_better_higher_and_faster_to_the_right(report, canvas):
    chart = scatter_chart(validate_report(report), canvas)
    points = {point.name: point for point in chart.points}
    assert set(points) == {row[0] for row in STEPS if row[5] is not None}
    assert points["control"].y < points["model"].y < points["onnx-int8"].y
    assert points["onnx-int8"].x > points["onnx-fp32"].x > points["model"].x
    assert all(canvas.left < p.x < canvas.end and canvas.top < p.y < canvas.floor for p in chart.points)
    assert points["onnx-int8"].x_low < points["onnx-int8"].x < points["onnx-int8"].x_high
    assert points["model"].y_high < points["model"].y < points["model"].y_low
    assert chart.logarithmic
    assert [name for name, point in points.items() if point.front] == report["frontier"]
    assert [name for name, point in points.items() if not point.competes] == ["quantize"]


def test_a_step_at_chance_is_left_out_and_does_not_stretch_the_axis(report):
    whole = scatter_chart(validate_report(report))
    low = report["steps"][1]["quality"]["bleu"]
    low.update(value=0.1, ci95=[0.0, 0.3], chance=0.2)
    drawn = scatter_chart(validate_report(report))
    assert {p.name for p in whole.points} - {p.name for p in drawn.points} == {report["steps"][1]["name"]}
    for step in report["steps"]:
        for score in step["quality"].values():
            score["chance"] = score["value"]
    assert len(scatter_chart(validate_report(report)).points) == len(whole.points)  # better than no picture


@pytest.mark.parametrize("canvas", [WIDE_CANVAS, NARROW_CANVAS])
def test_chart_of_a_single_step_without_spread(report, canvas):
    report["steps"] = report["steps"][:1]
    report["frontier"] = ["model"]
    report["steps"][0]["quality"]["bleu"].update(value=100.0, ci95=[100.0, 100.0])
    report["steps"][0]["latency"][0].update(speedup=1.0, speedup_ci95=[1.0, 1.0])
    chart = scatter_chart(validate_report(report), canvas)
    (point,) = chart.points
    assert point.x_low == point.x == point.x_high
    assert not chart.logarithmic
    assert canvas.left < point.x < canvas.end
    assert canvas.top < point.y < canvas.floor
    assert all(canvas.left <= x <= canvas.end for x, _ in chart.x_ticks)
    assert len(chart.x_ticks) >= 2
    assert len(chart.y_ticks) >= 2
    assert HtmlOutline(render_html(report)).open == []


def test_chart_labels_do_not_cover_each_other(report):
    chart = scatter_chart(validate_report(report))
    boxes = []
    for p in chart.points:
        length = len(p.name) * 6
        left = {"start": p.label_x, "end": p.label_x - length, "middle": p.label_x - length / 2}[p.anchor]
        boxes.append((left, p.label_y - 10, left + length, p.label_y))
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
