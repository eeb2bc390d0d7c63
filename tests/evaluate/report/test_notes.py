import html

import pytest

from smelt.evaluate.report import view
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html, render_table
from smelt.evaluate.report.schema import validate_report
from smelt.evaluate.report.step_schema import GateReport
from tests.support.standins.sample_report import mark_disturbed, ten_step_report


@pytest.fixture
def report():
    return ten_step_report()


def test_note_reports_required_sample_size_for_gate(report):
    report["steps"][6]["gates"] = [
        {
            "metric": "bleu",
            "kind": "max_degradation",
            "limit": 0.1,
            "value": 1.37,
            "passed": False,
            "n_needed": 12250,
        }
    ]
    [warning] = [
        text
        for name, kind, text in view.report_notes(validate_report(report))
        if (name, kind) == ("onnx-int8", "warning") and "13,000" in text
    ]
    assert all(value in warning for value in ("BLEU at most 0.10 worse", "n = 1,000", "±0.35"))
    assert warning in " ".join(render_table(report).split())
    assert warning in render_markdown(report).replace("\\", "")
    assert warning in render_html(report)


def test_note_reports_units_kept_by_budget(report):
    report["steps"][3]["details"]["budget"] = {
        "measure": "parameters", "asked": 0.5, "left": 0.4973, "unit": "parameters",
        "units": {"layers": [12, 8], "width": [512, 512], "heads": [144, 40], "neurons": [24576, 9000]},
    }  # fmt: skip
    name = report["steps"][3]["name"]
    [text] = [text for step, kind, text in view.report_notes(validate_report(report)) if kind == "info"]
    assert text in html.unescape(render_markdown(report))
    assert text in html.unescape(render_html(report))
    values = ("49.7 %", "50 %", "layers 12 -> 8", "width 512,", "heads 144 -> 40", "neurons 24,576 -> 9,000")
    assert all(value in text for value in values)
    assert (name, "info", text) in view.report_notes(validate_report(report))


def test_note_lists_labels_of_teachers_that_differ(report):
    teachers = [
        {"teacher": "/a/topics", "labels": ["news", "sport"]},
        {"teacher": "tuned", "labels": ["neg"]},
    ]
    report["steps"][2]["details"]["labels_by_teacher"] = teachers
    report["steps"][3]["details"]["labels_by_teacher"] = [teachers[1], teachers[1]]  # all have the same
    [(name, text)] = [
        (name, text) for name, kind, text in view.report_notes(validate_report(report)) if kind == "info"
    ]
    assert name == report["steps"][2]["name"]
    assert "topics: news, sport; tuned: neg" in text
    assert text in render_markdown(report)
    assert text in render_html(report)


def test_note_names_steps_with_answers_that_depend_on_the_batch(report):
    for step, depends in zip(report["steps"][1:3], (True, False), strict=True):
        step["details"]["depends_on_batch"] = depends
    [(name, text)] = [
        (name, text) for name, kind, text in view.report_notes(validate_report(report)) if kind == "info"
    ]
    assert name == report["steps"][1]["name"]
    assert text in render_markdown(report)
    assert text in render_html(report)


def test_gate_with_confidence_reports_judged_bound():
    gate = GateReport(
        metric="bleu", kind="max_degradation", limit=1.0, value=0.4, bound=0.75, confidence=0.95, passed=True
    )
    assert view.gate_text(gate) == "BLEU at most 1.00 worse at confidence 0.95"
    assert view.gate_value_text(gate) == "0.40 worse, bound 0.75 worse"
    gain = gate.model_copy(update={"value": -5.05, "bound": None, "confidence": None})
    assert view.gate_result_text(gain) == "BLEU 5.05 better (at most 1.00 worse)"
    assert (
        view.gate_value_text(GateReport(metric="size_bytes", kind="max", limit=2e6, value=1e6, passed=True))
        == "1.00 MB"
    )


def test_disturbed_steps_share_one_note(report):
    round_details = {
        "counted": True,
        "processor_share": 1.0,
        "baseline_processor_share": 1.0,
        "baseline_ms": 100.0,
    }
    round_details |= {"other_processors": 0.5, "cpu_steal": 0.0, "pressure": None, "speedup": None}
    for step, share in ((report["steps"][6], 0.4), (report["steps"][7], 0.3)):
        for row in step["latency"]:
            mark_disturbed(row)
            row["rounds"] = [round_details | {"lost_share": share}]
    note_texts = [
        text for name, kind, text in view.report_notes(validate_report(report)) if kind == "disturbed"
    ]
    (text,) = note_texts
    assert "onnx-int8 (batch 1, 8), onnx-fp32 (batch 1, 8)" in text
    assert "40 %" in text


def test_compiled_baseline_is_named_in_every_page(report):
    for latency, is_named in (
        (False, False),
        ({"baseline": "eager"}, False),
        ({"baseline": "compiled"}, True),
    ):
        report["recipe"]["score"] = report["recipe"].get("score", {}) | {"latency": latency}
        pages = (render_table(report), render_markdown(report), render_html(report))
        assert ["torch.compile" in " ".join(page.split()) for page in pages] == [is_named] * 3
