"""The table that a terminal shows."""

import pytest

from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_table
from tests.support.standins.sample_report import make_message, ten_step_report

pytestmark = pytest.mark.quick


@pytest.fixture
def report():
    return ten_step_report()


@pytest.mark.parametrize("width", [80, 100])
def test_table_fits_width_and_contains_numbers(report, width):
    report["steps"][1]["name"] = (
        "a-very-long-name-of-a-step-chosen-without-a-thought-of-the-width-of-a-terminal"
    )
    report["pareto_front"] = []
    text = render_table(report, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    line = next(table_line for table_line in lines if "onnx-int8" in table_line)
    assert line.split()[-7:] == ["37.05", "−1.37*", "[−1.72,", "−1.02]", "14.2", "5.94×", "25.1"]
    assert any("engine" in table_line and table_line.endswith("  skipped") for table_line in lines)
    flat = " ".join(text.split())
    assert f"'engine': skipped: {report['steps'][8]['reason']}" in flat  # whole, with what to do
    assert "'onnx-int8': gate failed: BLEU 1.37 worse (at most 1.00 worse)" in flat
    assert "95 %" in flat
    assert lines[0] == "Status: gate-failed."


def test_insignificant_differences_are_not_marked(report):
    report["warnings"] = [make_message("m.onnx draws", "random-outputs")]
    text = render_table(report)
    assert "−1.37" in text
    assert "*" not in text
    table_rows = [line for line in render_markdown(report).splitlines() if line.startswith("|")]
    assert any("−1.37" in row for row in table_rows)
    assert not any("\\*" in row for row in table_rows)


def test_bits_column_is_shown_only_if_bits_differ_and_names_fit(report):
    for index, bits in ((7, 8.143), (5, 8.143)):
        assert "bits" not in render_table(report)
        report["steps"][index]["details"] = {"bits_per_weight": bits}
    assert "bits" not in render_table(report)  # one value says nothing
    report["steps"][5]["details"] = {"bits_per_weight": 4.503}
    lines = render_table(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert next(table_line for table_line in lines if table_line.startswith("step")).split()[-2:] == [
        "MB",
        "bits",
    ]
    for name, end in (("quantize", ["24.4", "4.503"]), ("onnx-int8", ["25.1", "4.503"])):  # codes stay codes
        assert next(table_line for table_line in lines if name in table_line).split()[-2:] == end
    assert next(table_line for table_line in lines if table_line.startswith("model")).split()[-1] == "–"
    report["steps"][5]["name"] = "q" * 40  # no room left: all others stay
    report["steps"][6]["parent"], report["pareto_front"] = "q" * 40, []
    narrow = render_table(report).splitlines()
    assert "bits" not in "".join(narrow)
    assert next(table_line for table_line in narrow if table_line.startswith("step")).split()[-2:] == [
        "speed-up",
        "MB",
    ]


def test_first_warnings_are_shown_and_remaining_steps_are_listed(report):
    for step in report["steps"]:
        step["warnings"] = []
    for step, texts in (
        (1, ["slower in batches", "padded"]),
        (2, ["slower in batches", "cut"]),
        (3, ["odd"]),
    ):
        report["steps"][step]["warnings"] = [make_message(text) for text in texts]
    names = [step["name"] for step in report["steps"]]
    text = " ".join(render_table(report).split())
    assert f"warning: '{names[1]}', '{names[2]}': slower in batches warning: '{names[1]}': padded" in text
    assert f"warning: '{names[2]}': cut the report has 1 more warning, about '{names[3]}'" in text
    assert "odd" not in text
    report["steps"][3]["warnings"] = []
    assert "more warning" not in render_table(report)


def test_truncated_text_warnings_are_listed_last(report):
    for step in report["steps"]:
        step["warnings"] = []
    report["steps"][1]["warnings"] = [
        make_message("finetune: 1,204 texts", "truncated-texts"),
        make_message("1 of 9 texts", "truncated-texts"),
    ]
    report["steps"][2]["warnings"] = [
        make_message("quantize: 1 text of 8", "truncated-texts"),
        make_message("the pairs take what their codes save"),
        make_message("5 of 9 outputs (55.6 %) did not end", "outputs-not-ended"),
        make_message("exclude: no layer is named *.nosuch.*"),
    ]
    first, second = (report["steps"][i]["name"] for i in (1, 2))
    text = " ".join(render_table(report).split())
    positions = [
        text.index(warning_text) for warning_text in ("the pairs take", "5 of 9 outputs", "exclude: no layer")
    ]
    assert positions == sorted(positions)
    assert f"the report has 3 more warnings, about '{first}', '{second}'" in text
    markdown = render_markdown(report)
    assert markdown.index("exclude: no layer") < markdown.index("1 text of 8")
