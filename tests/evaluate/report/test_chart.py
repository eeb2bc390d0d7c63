"""The chart of quality over speed."""

import io
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from PIL import Image

from smelt.evaluate.report.chart import (
    CHART_FILES,
    NARROW,
    WIDE,
    chart_file,
    chart_files,
    page_figure,
    scatter_chart,
)
from smelt.evaluate.report.drawing import PALETTES, page_svg
from smelt.evaluate.report.render import render_html
from smelt.evaluate.report.schema import validate_report
from tests.support.standins.sample_report import STEPS, HtmlOutline, ten_step_report

pytestmark = pytest.mark.quick


@pytest.fixture
def report():
    return ten_step_report()


def drawn(report, size=WIDE):
    """Return the chart on the page, and by text its (x, y, text-anchor, opacity)."""
    root = ET.fromstring(page_svg(page_figure(scatter_chart(validate_report(report)), size, "a chart")))
    texts = {}
    for text in root.iter("text"):
        style = text.get("style")
        position = [float(v) for v in re.findall(r"-?[\d.]+", text.get("transform"))][-2:]
        anchor = re.search(r"text-anchor: (\w+)", style)
        texts[text.text] = (*position, anchor[1] if anchor else "start", "opacity" in style)
    return root, texts


def test_chart_contains_steps_with_intervals(report):
    chart = scatter_chart(validate_report(report))
    points = {point.name: point for point in chart.points}
    assert set(points) == {row[0] for row in STEPS if row[5] is not None}
    for step in report["steps"]:
        if step["name"] in points:
            point, speed = points[step["name"]], step["latency"][0]
            assert (point.x, [point.x_low, point.x_high]) == (speed["speedup"], speed["speedup_ci95"])
            assert [point.y_low, point.y_high] == step["quality"]["bleu"]["ci95"]
            assert f"{point.y:.2f}" in point.title
    assert chart.logarithmic
    assert [name for name, point in points.items() if point.front] == report["pareto_front"]
    assert [name for name, point in points.items() if not point.competes] == ["quantize"]


def marker_places(root):
    """Return (x, y) of the markers that have a title."""
    for group in root.iter("g"):
        if group.find("title") is not None:
            marker = next(group.iter("use"))
            yield float(marker.get("x")), float(marker.get("y"))


def test_step_at_chance_is_omitted_from_chart(report):
    full_chart = scatter_chart(validate_report(report))
    low = report["steps"][1]["quality"]["bleu"]
    low.update(value=0.1, ci95=[0.0, 0.3], chance=0.2)
    reduced_chart = scatter_chart(validate_report(report))
    assert {p.name for p in full_chart.points} - {p.name for p in reduced_chart.points} == {
        report["steps"][1]["name"]
    }
    for step in report["steps"]:
        for score in step["quality"].values():
            score["chance"] = score["value"]
    assert len(scatter_chart(validate_report(report)).points) == len(
        full_chart.points
    )  # better than no picture


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_chart_of_a_single_step_without_spread(report, size):
    report["steps"] = report["steps"][:1]
    report["pareto_front"] = ["model"]
    report["steps"][0]["quality"]["bleu"].update(value=100.0, ci95=[100.0, 100.0])
    report["steps"][0]["latency"][0].update(speedup=1.0, speedup_ci95=[1.0, 1.0])
    root, texts = drawn(report, size)
    ((x, y),) = marker_places(root)
    assert size.left < x < size.width - size.right
    assert size.top < y < size.height - size.bottom
    assert sum("×" in text for text in texts) >= 2
    assert not any("log scale" in text for text in texts)
    assert HtmlOutline(render_html(report)).open == []


def test_nearly_equal_values_have_short_ticks(report):
    report["steps"], report["pareto_front"] = report["steps"][:2], ["model"]
    for number, step in enumerate(report["steps"]):
        score = 331.90223 + 1e-6 * number
        step["quality"]["bleu"].update(value=score, ci95=[score, score])
    _, texts = drawn(report, WIDE)
    ticks = [text for text in texts if text.startswith("33") and text.replace(".", "").isdigit()]
    assert len(ticks) >= 3
    assert max(map(len, ticks)) <= 6


def test_chart_files_have_both_themes_and_are_deterministic(report):
    files = chart_files(validate_report(report))
    assert files.keys() == set(CHART_FILES)
    chart = scatter_chart(validate_report(report))
    assert len({chart_file(chart, PALETTES["dark"], "svg") for _ in range(2)}) == 1
    for name in CHART_FILES:
        background = PALETTES["dark" if "dark" in name else "light"]["card"]
        if name.endswith(".png"):
            corner = Image.open(io.BytesIO(files[name])).convert("RGB").getpixel((0, 0))
            assert "#" + bytes(corner).hex() == background
        else:
            texts = [
                text.text for text in ET.fromstring(files[name]).iter("{http://www.w3.org/2000/svg}text")
            ]
            assert ({"baseline", "Pareto front"} if "report" in name else {"distill"}) <= set(texts)
            assert background in files[name].decode()


@pytest.mark.parametrize(("backend", "is_kept"), [("no-such-backend", False), ("pdf", True)])
def test_figures_are_rendered_with_any_mplbackend(backend, is_kept):
    """Jupyter sets `MPLBACKEND` for all processes to a backend that exists only in its own environment."""
    code = (
        "import os; from smelt.evaluate.report.drawing import figure_bytes, new_figure, PALETTES\n"
        "drawn = figure_bytes(lambda colors: new_figure(72, 72, colors), PALETTES['light'], 'svg')\n"
        "import matplotlib\n"
        "print(b'<svg' in drawn, os.environ['MPLBACKEND'], matplotlib.rcParams['backend'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MPLBACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    is_drawn, variable, used_backend = done.stdout.split()
    assert (is_drawn, variable, used_backend == backend) == ("True", backend, is_kept)


def test_names_are_escaped_in_charts(report):
    name = "$\\frac{$ <b>&\x1b[2J"
    report["steps"][0]["name"] = report["baseline"] = name
    report["steps"][1]["parent"] = report["steps"][2]["parent"] = name
    root, texts = drawn(report)
    assert "$\\frac{$ <b>&\\x1b[2J" in texts
    assert any(title.text.startswith("$\\frac{$ <b>&\\x1b[2J: ") for title in root.iter("title"))
    assert chart_file(scatter_chart(validate_report(report)), PALETTES["light"], "png")
