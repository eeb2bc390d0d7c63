"""The report's schema and its three drawings, on a sample with branches, a skipped step and a failed one."""

import copy
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sample_report import STEPS, disturb, sample

from smelt.core.errors import InputError
from smelt.evaluate.report.chart import NARROW, WIDE, scatter
from smelt.evaluate.report.html import write_html
from smelt.evaluate.report.markdown import write_markdown
from smelt.evaluate.report.schema import (
    ClassifierParts,
    Difference,
    Gate,
    GenerationParts,
    Latency,
    Quality,
    Report,
    Round,
    Step,
    validate_report,
)
from smelt.evaluate.report.table import table
from smelt.evaluate.report.view import number, rows, signed, significant_digits


@pytest.fixture
def report():
    return sample()


class Outline(HTMLParser):
    """Collects tags, attributes and text, and checks that tags close in order."""

    VOID = frozenset({"meta", "br", "rect", "circle", "path", "line"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.values, self.texts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.values += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_schema_accepts_the_sample_and_writes_it_back_unchanged(report):
    dumped = validate_report(report).model_dump(mode="json", exclude_unset=True)
    assert json.loads(json.dumps(dumped)) == json.loads(json.dumps(report))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(schema=2), r"schema: .*read 2"),
        (lambda r: r.update(status="fine"), "status: .*'passed'.*read 'fine'"),
        (lambda r: r["steps"][1].update(colour="red"), r"steps\.1\.colour"),
        (lambda r: r["steps"][1].update(name="model"), "two steps are named 'model'"),
        (lambda r: r["steps"][1].update(parent="engine"), "'control' goes on from 'engine'"),
        (lambda r: r.update(frontier=["nobody"]), "'frontier' names 'nobody'"),
        (lambda r: r.update(baseline="nobody"), "'baseline' names 'nobody'"),
        (lambda r: r["steps"][8].update(reason=None), "skipped step needs a 'reason'"),
        (lambda r: r["steps"][9].update(error=None), "needs the 'error' text"),
        (lambda r: r["steps"][0]["quality"]["bleu"].update(ci95=[3, 1]), "lower end 3.0 lies above"),
        (lambda r: r["steps"][0]["quality"]["bleu"].update(value=float("nan")), "finite number"),
        (lambda r: r["steps"][0]["latency"][0].pop("p50_ms"), r"steps\.0\.latency\.0\.p50_ms"),
    ],
)
def test_schema_names_every_mistake(report, change, message):
    change(report)
    with pytest.raises(InputError, match=message):
        validate_report(report)


def test_all_mistakes_are_told_at_once(report):
    report["status"] = "fine"
    report["steps"][0]["stage"] = 3
    with pytest.raises(InputError, match=r"(?s)status.*steps\.0\.stage|steps\.0\.stage.*status"):
        validate_report(report)


def test_tree_draws_branches_and_keeps_chains_level(report):
    drawn = [row.branch + row.step.name for row in rows(validate_report(report))]
    assert drawn == [
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


def test_html_fetches_nothing_and_is_small(report):
    text = write_html(report)
    assert not re.search(r"https?:|//\w|url\(|@import|<script|<link|<img|<iframe|\bsrc=", text)
    assert "default-src 'none'" in text
    assert len(text.encode()) < 100_000


def test_html_is_well_formed_and_holds_the_numbers(report):
    outline = Outline(write_html(report))
    assert outline.open == []
    assert "to the first token" in outline.texts
    text = " ".join(outline.texts)
    for one in report["steps"]:
        assert one["name"] in text
        for score in one["quality"].values():
            assert f"{score['value']:.2f}" in text
            assert f"[{score['ci95'][0]:.2f}, {score['ci95'][1]:.2f}]" in text
        for entry in one["latency"]:
            assert f"{entry['speedup']:.2f}×" in text
            assert significant_digits(entry["p50_ms"]) in text
    small, engine, openvino = (report["steps"][i] for i in (4, 8, 9))
    for said in (engine["reason"], openvino["error"], small["warnings"][0]):
        assert said in text
    assert "None" not in text
    assert "null" not in text


def test_html_escapes_what_a_stranger_wrote(report):
    evil = "<script>alert(1)</script>\"'&"
    report["recipe"]["model"] = evil
    report["environment"]["cpu"] = evil
    report["steps"][1]["name"] = evil
    report["steps"][2]["settings"] = {evil: evil}
    report["steps"][8]["reason"] = evil
    report["steps"][0]["warnings"] = [evil]
    report["steps"][0]["quality"]["bleu"]["signature"] = evil
    report["frontier"] = [evil]
    text = write_html(report)
    outline = Outline(text)
    assert "script" not in outline.tags
    assert outline.open == []
    assert html.escape("<script>alert(1)</script>", quote=False) in text


def test_html_marks_only_significant_differences(report):
    text = write_html(report)
    assert re.search(r'class="bad"[^>]*>−0\.91<abbr', text)  # prune, p = 0.002
    report["steps"][3]["against_baseline"]["bleu"]["p_value"] = 0.5
    assert re.search(r'class="even"[^>]*>−0\.91</span>', write_html(report))


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_reports_of_failed_runs_can_be_drawn(report, kept):
    report["steps"] = report["steps"][:kept]
    for one in report["steps"]:
        one.update(status="error", error="broke", quality={}, latency=[], size_bytes=None)
    report.update(status="error", baseline="model" if kept else None, frontier=[])
    assert Outline(write_html(report)).open == []
    assert "error" in write_markdown(report)
    assert "status: error" in table(report)


@pytest.mark.parametrize("canvas", [WIDE, NARROW])
def test_chart_places_better_higher_and_faster_to_the_right(report, canvas):
    chart = scatter(validate_report(report), canvas)
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


@pytest.mark.parametrize("canvas", [WIDE, NARROW])
def test_chart_of_a_single_step_without_spread(report, canvas):
    report["steps"] = report["steps"][:1]
    report["frontier"] = ["model"]
    report["steps"][0]["quality"]["bleu"].update(value=100.0, ci95=[100.0, 100.0])
    report["steps"][0]["latency"][0].update(speedup=1.0, speedup_ci95=[1.0, 1.0])
    chart = scatter(validate_report(report), canvas)
    (point,) = chart.points
    assert point.x_low == point.x == point.x_high
    assert not chart.logarithmic
    assert canvas.left < point.x < canvas.end
    assert canvas.top < point.y < canvas.floor
    assert all(canvas.left <= x <= canvas.end for x, _ in chart.x_ticks)
    assert len(chart.x_ticks) >= 2
    assert len(chart.y_ticks) >= 2
    assert Outline(write_html(report)).open == []


def test_tiny_p_values_are_not_shown_as_zero(report):
    report["steps"][6]["against_parent"]["bleu"]["p_value"] = 1e-7
    text = " ".join(Outline(write_html(report)).texts)
    assert "p < 0.001" in text
    assert "p = 0.000" not in text


def test_chart_labels_do_not_cover_each_other(report):
    chart = scatter(validate_report(report))
    boxes = []
    for p in chart.points:
        length = len(p.name) * 6
        left = {"start": p.label_x, "end": p.label_x - length, "middle": p.label_x - length / 2}[p.anchor]
        boxes.append((left, p.label_y - 10, left + length, p.label_y))
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def cells_of(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_markdown_tables_are_well_formed_and_hold_the_numbers(report):
    text = write_markdown(report)
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 5
    for block in blocks:
        assert len({len(cells_of(line)) for line in block}) == 1
        assert all(re.fullmatch(r":--|--:", cell) for cell in cells_of(block[1]))
    body = {cells_of(line)[0].split(" ")[-1].split(";")[-1]: cells_of(line) for line in blocks[0][2:]}
    assert len(body) == 10
    assert body["prune"][4] == r"37.51 \[36.20, 38.79\]"
    assert body["prune"][5] == r"−0.91\*"
    assert body["prune"][6] == "46.2"
    assert body["prune"][10] == "88.2 (67 %)"
    assert body["engine"][3:6] == ["skipped", "–", "–"]
    assert "TensorRT is not installed" in text
    assert "**failed**" in text


def test_markdown_escapes_names(report):
    report["steps"][1]["name"] = "a|b <script>*x*"
    report["recipe"]["model"] = "# <b>"
    report["frontier"] = []
    text = write_markdown(report)
    assert "<script>" not in text
    assert "<b>" not in text
    assert r"a\|b &lt;script&gt;\*x\*" in text
    block = next(block for block in text.split("\n\n") if block.startswith("|"))
    assert len({len(cells_of(line)) for line in block.splitlines()}) == 1


@pytest.mark.parametrize("width", [80, 100])
def test_table_fits_and_holds_the_numbers(report, width):
    report["steps"][1]["name"] = (
        "a-very-long-name-of-a-step-chosen-without-a-thought-of-the-width-of-a-terminal"
    )
    report["frontier"] = []
    text = table(report, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    line = next(one for one in lines if "onnx-int8" in one)
    assert line.split()[-5:] == ["37.05", "−1.37*", "14.2", "5.94×", "25.1"]
    assert any("engine" in one and "skipped: TensorRT is not installed" in one for one in lines)
    assert "gate failed at 'onnx-int8': BLEU max_drop 1.00, read 1.37" in text
    assert lines[-1] == "status: gate-failed"


def test_table_can_be_plain_ascii(report):
    assert table(report, ascii_only=True).isascii()


def test_latency_error_of_a_finished_step_is_shown(report):
    report["steps"][3]["error"] = "latency: the process was killed"
    assert "the process was killed" in table(report)
    assert "the process was killed" in write_markdown(report)
    assert "the process was killed" in write_html(report)


@pytest.fixture
def unscored(report):
    """The sample with an engine that was built where nothing can run it."""
    why = "scoring needs a CUDA GPU that torch can use, and there is none here"
    engine = report["steps"][8]
    engine.update(status="done", reason=why, format="tensorrt", target="tensorrt", size_bytes=40_000_000)
    engine["gates"] = [
        {"metric": "bleu", "kind": "max_drop", "limit": 1.0, "value": None, "passed": None, "reason": why},
        {"metric": "size_bytes", "kind": "max", "limit": 90e6, "value": 40e6, "passed": True, "reason": None},
    ]
    return report


def test_engine_that_was_not_scored_says_why_in_every_drawing(unscored):
    why = unscored["steps"][8]["reason"]
    text = " ".join(Outline(write_html(unscored)).texts)
    assert "not scored" in text
    assert f": gate BLEU max_drop 1.00: {why}" in text
    assert "skipped" not in text
    markdown = write_markdown(unscored)
    rows = [cells_of(line) for line in markdown.splitlines() if "engine" in line and line.startswith("|")]
    assert rows[0][2:6] == ["tensorrt · tensorrt", "done", "–", "–"]
    assert [row[3] for row in rows[1:]] == ["**not judged**", "passed"]
    assert f"- **engine** not scored: {why}" in markdown
    drawn = table(unscored)
    assert next(line for line in drawn.splitlines() if "engine" in line).split()[-5:] == ["–"] * 4 + ["40.0"]
    flat = " ".join(drawn.split())
    assert "gate not judged at 'engine': BLEU max_drop 1.00 " in flat
    assert f"'engine' is not scored: {why}" in flat


def test_gate_that_was_not_judged_must_say_why(unscored):
    unscored["steps"][8]["gates"][0]["reason"] = None
    with pytest.raises(InputError, match="not judged needs a 'reason'"):
        validate_report(unscored)


def test_drawing_leaves_the_report_alone(report):
    before = copy.deepcopy(report)
    write_html(report), write_markdown(report), table(report)
    assert report == before


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0.00"), (-0.001, "0.00"), (-1.5, "−1.50"), (1.5, "+1.50"), (1234.5, "+1,234.50")],
)
def test_signed_numbers(value, text):
    assert signed(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "0.01"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (12345, "12,345")]
)
def test_significant_digits(value, text):
    assert significant_digits(value) == text
    assert number(float(value), 0) == f"{value:,.0f}"


def test_docs_name_every_key_of_the_schema():
    text = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")
    for part in (
        *(Report, Step, Quality, Latency, Difference, Gate),
        *(GenerationParts, ClassifierParts, Round),
    ):
        for name, field in part.model_fields.items():
            assert f"`{field.alias or name}`" in text
    example = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])
    model = {"name": "model", "stage": "model", "status": "done"}
    quantize = {"name": "quantize", "stage": "quantize", "status": "done", "parent": "model"}
    report = {
        "schema": 1,
        "recipe": {},
        "environment": {},
        "status": "gate-failed",
        "steps": [model, quantize],
    }
    report["steps"].append(example)
    assert validate_report(report).steps[2].quality["bleu"].value == 37.05


def test_times_that_were_disturbed_are_marked_in_every_drawing(report):
    disturb(report["steps"][6]["latency"][0])
    report["steps"][6]["gates"] = []
    text = " ".join(Outline(write_html(report)).texts)
    assert "5.94× ?" in text
    assert "No speed is claimed" in text
    markdown = write_markdown(report)
    assert "5.94×?" in markdown
    assert "No speed is claimed" in markdown
    assert "- **onnx-int8** disturbed: times at batch 1: other work took the processor in 9 of 9" in markdown
    drawn = table(report)
    assert "5.94×?" in drawn
    assert "? disturbed while it was timed: no speed is claimed" in " ".join(drawn.split())
    (point,) = (p for p in scatter(validate_report(report)).points if p.name.startswith("onnx-int8"))
    assert (point.name, point.competes) == ("onnx-int8 ?", False)


def test_times_that_are_not_stable_must_say_why(report):
    report["steps"][6]["latency"][0]["stable"] = False
    with pytest.raises(InputError, match="not stable need a 'reason'"):
        validate_report(report)


def test_table_of_steps_shows_its_figures_in_cards_on_narrow_screens(report):
    text = write_html(report)
    outline = Outline(text)
    labels = {value for name, value in outline.values if name == "data-label"}
    assert labels == {
        *(
            "BLEU",
            "BLEU diff.",
            "chrF",
            "chrF diff.",
            "difference",
            "p50 ms, batch 1",
            "speed, batch 1",
            "p50 ms, batch 8",
        ),
        *("speed, batch 8", "size, MB", "M parameters", "gates"),
    }
    # no cell of the table may stand beside the next where there is no room: each row becomes a card
    narrow = text[text.index("@media (max-width: 820px)") :]
    assert re.search(r"table\.cards tr \{ display: grid;", narrow)
    assert "min-width: 520px" not in text
    assert text.count("<table") == text.count('<table class="cards">') == 2


def test_parts_stand_in_markdown_with_the_words_of_the_task(report):
    text = write_markdown(report)
    block = next(b for b in text.split("\n\n") if "to the first token" in b)
    head, _, first = block.splitlines()[:3]
    assert cells_of(head)[2:] == [
        f"{name} ms"
        for name in ("tokenizing", "encoder", "to the first token", "per further token", "detokenizing")
    ]
    assert cells_of(first)[:4] == ["model", "1", "0.30", "16.9"]
    report["recipe"]["task"] = "language-modeling"
    assert "prefill ms" in write_markdown(report)
    for one in report["steps"]:
        for row in one["latency"]:
            row["parts"] = {"tokenizing_ms": 0.2, "model_ms": 3.0, "rest_ms": 0.1}
    assert "| model ms | labels ms |" in write_markdown(report)
    assert Outline(write_html(report)).open == []


def test_a_language_models_n_is_in_tokens(report):
    for one in report["steps"]:
        if one["quality"]:
            one["quality"] = {"perplexity": one["quality"]["bleu"] | {"n": 12345}}
        one["against_baseline"], one["gates"] = {}, []
    assert "n = 12,345 tokens" in write_markdown(report)
    assert "n = 12,345 tokens" in table(report)
    assert "Test tokens" in write_html(report)
    assert "n = 1,000 examples" in write_markdown(sample())
