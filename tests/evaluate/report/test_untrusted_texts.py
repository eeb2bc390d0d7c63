"""Texts of a report may come from a stranger: none is markup, a formula or a control in a rendering."""

import csv
import io
import re

import pytest
from pydantic import ValidationError

from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html
from smelt.evaluate.report.schema import ReportData
from smelt.pipeline.execute.run_result import report_csv
from tests.support.standins.sample_report import (
    HtmlOutline,
    make_message,
    mark_disturbed,
    ten_step_report,
    with_verdict,
)

pytestmark = pytest.mark.quick

UNTRUSTED = "=cmd|' /C calc'!A0 \x1b[31m\u202e<i>*x* `y` [z](u)\n\n# heading\n| a | b |"


@pytest.fixture(scope="module")
def untrusted_report():
    """A report with every section, in which each text that the schema does not fix is hostile."""
    report = ten_step_report()
    difference = {"difference": -1.0, "ci95": [-2.0, -0.5], "p_value": 0.001}
    step = report["steps"][6]
    step["gates"][0].update(value=0.5, passed=True)  # so that the verdict recommends the step
    scores = {"quality": step["quality"], "against_baseline": {"bleu": difference}}
    step["test"] = scores | {"gates": [{**step["gates"][0], "reason": "reason"}]}
    step["agreement"] = {"n": 10, "equal": 50.0, "bleu": 71.5, "kl_reason": "reason"}
    step["folds"] = {"bleu": {"values": [1, 2], "mean": 1.5, "std": 0.7, "against_baseline": difference}}
    step["confusion"] = {"labels": ["first", "second"], "counts": [[30, 2], [5, 3]]}
    example = {"row": 1, "source": "source", "text_pair": "pair", "references": ["reference"]}
    example |= {"baseline_output": "one two", "output": "one three", "baseline_value": 1.0, "value": 0.0}
    counts = {"n": 9, "num_worse": 1, "num_better": 1}
    step["examples"] = {"metric": "bleu", **counts, "worse": [example], "better": [example]}
    layer = {"name": "layer", "part": "block", "sqnr_db": 12.0}
    step["layer_sqnr"] = {"samples": 2, "output_sqnr_db": 9.0, "layers": [layer], "reason": "reason"}
    step["device"] = "cpu"
    step["gates"].append({"metric": "chrf", "kind": "min", "limit": 1, "value": None, "passed": None})
    step["gates"][-1]["reason"] = "reason"
    mark_disturbed(step["latency"][0])
    report = with_verdict(report)
    report["verdict"]["warnings"] = [make_message("warning of the verdict")]
    report["warnings"] = [make_message("warning of the run")]
    return make_untrusted(report)


def make_untrusted(report):
    """Put `UNTRUSTED` before every text of `report`, except for those that the schema then refuses."""
    texts = set(_texts(report))
    while True:
        untrusted = _replace(report, texts)
        try:
            ReportData.model_validate(untrusted)
        except ValidationError as error:
            inputs = [schema_error["input"] for schema_error in error.errors()]
            refused = {text.removeprefix(UNTRUSTED) for text in inputs if isinstance(text, str)}
            assert refused & texts
            texts -= refused
        else:
            return untrusted


def _texts(value):
    if isinstance(value, dict):
        value = [item for name, item in value.items() if name != "code"]
    if isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _replace(value, texts):
    if isinstance(value, dict):
        return {name: item if name == "code" else _replace(item, texts) for name, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, texts) for item in value]
    return f"{UNTRUSTED}{value}" if isinstance(value, str) and value in texts else value


def test_html_page_escapes_markup_and_control_characters(untrusted_report):
    page = render_html(untrusted_report)
    outline = HtmlOutline(page)
    assert outline.open == []
    assert "i" not in outline.tags
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page)
    for text in ("warning of the verdict", "warning of the run", "cpu"):
        assert text in " ".join(outline.texts), text


def test_markdown_escapes_markup_and_control_characters(untrusted_report):
    text = render_markdown(untrusted_report)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert not re.search(r"<i>|(?<!\\)\*x|(?<!\\)\[z|(?<!\\)`y|^# heading|^\| a \|", text, re.MULTILINE)
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 10
    for block in blocks:
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in block}) == 1


def test_csv_table_escapes_formulas(untrusted_report):
    table = report_csv(untrusted_report)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", table)
    csv_rows = list(csv.DictReader(io.StringIO(table)))
    assert len(csv_rows) == 10
    assert not any(cell[:1] in {"=", "+", "@", "\t"} for row in csv_rows for cell in row.values())
    assert csv_rows[6]["target"].startswith("'=cmd")
    assert float(csv_rows[6]["bleu_difference"]) < 0  # a number keeps its sign
