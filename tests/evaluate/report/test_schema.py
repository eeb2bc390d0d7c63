"""What a report must hold, and what is said of one that does not."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from smelt.core.errors import InputError
from smelt.core.messages import Message
from smelt.evaluate.report.schema import ReportData, StepReport, Verdict, validate_report
from smelt.evaluate.report.step_schema import (
    Agreement,
    ChangedExample,
    ClassifierTimings,
    Confusion,
    ConfusionCount,
    Examples,
    GateReport,
    GenerationTimings,
    LatencyReport,
    Quality,
    RoundReport,
    ScoreDifference,
)
from tests.support.expected_errors import message_locations, raises_code
from tests.support.standins import sample_report
from tests.support.standins.sample_report import ten_step_report

pytestmark = pytest.mark.quick


@pytest.fixture
def report():
    return ten_step_report()


def test_schema_round_trips_sample_report(report):
    dumped = validate_report(report).model_dump(mode="json", exclude_unset=True)
    assert json.loads(json.dumps(dumped)) == json.loads(json.dumps(report))


@pytest.mark.parametrize(("change", "code", "setting", "read"), [
    (lambda r: r.update(schema=1), "literal-error", "schema", "1"),
    (lambda r: r.update(status="fine"), "literal-error", "status", "'fine'"),
    (lambda r: r["steps"][1].update(color="red"), "extra-forbidden", "steps.1.color", "'red'"),
    (lambda r: r["steps"][1].update(name="model"), "duplicate-step", None, "'model'"),
    (lambda r: r["steps"][1].update(parent="engine"), "unknown-parent", None, "'engine'"),
    (lambda r: r.update(pareto_front=["nobody"]), "unknown-step", None, "'nobody'"),
    (lambda r: r.update(baseline="nobody"), "unknown-step", None, "'nobody'"),
    (lambda r: r["steps"][8].update(reason=None), "missing-reason", "steps.8", "'reason'"),
    (lambda r: r["steps"][9].update(error=None), "missing-error", "steps.9", "'error'"),
    (lambda r: r["steps"][9].update(error="broke"), "dataclass-type", "steps.9.error", "'broke'"),
    (lambda r: r["steps"][0]["quality"]["bleu"].update(ci95=[3, 1]), "wrong-interval",
     "steps.0.quality.bleu", "3.0"),
    (lambda r: r["steps"][0]["quality"]["bleu"].update(value=float("nan")), "finite-number",
     "steps.0.quality.bleu.value", "nan"),
    (lambda r: r["steps"][0]["latency"][0].pop("p50_ms"), "missing", "steps.0.latency.0.p50_ms", ""),
])  # fmt: skip
def test_schema_reports_every_error(report, change, code, setting, read):
    change(report)
    with raises_code("invalid-report", InputError) as excinfo:
        validate_report(report)
    [schema_error] = excinfo.value.messages
    assert (schema_error.code, schema_error.setting) == (code, setting)
    assert read in schema_error.message
    assert (setting or "report") in str(excinfo.value)


def test_all_errors_are_reported_together(report):
    report["status"] = "fine"
    report["steps"][0]["stage"] = 3
    with raises_code("invalid-report", InputError) as excinfo:
        validate_report(report)
    assert {schema_error.setting for schema_error in excinfo.value.messages} == {"status", "steps.0.stage"}


@pytest.fixture
def unscored():
    return sample_report.report_with_unscored_step()


def test_unjudged_gate_requires_reason(unscored):
    unscored["steps"][8]["gates"][0]["reason"] = None
    with raises_code("invalid-report", InputError) as excinfo:
        validate_report(unscored)
    assert message_locations(excinfo.value.messages) == [("missing-reason", "steps.8.gates.0", None)]


def test_docs_list_every_schema_key():
    docs = Path(__file__).parents[3] / "docs"
    pages = (docs / "reference" / "report.md", docs / "explanation" / "latency.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for part in (
        *(ReportData, StepReport, Quality, LatencyReport, ScoreDifference, GateReport, Verdict),
        *(GenerationTimings, ClassifierTimings, RoundReport),
        *(Agreement, Confusion, ConfusionCount, Examples, ChangedExample),
    ):
        for name, field in part.model_fields.items():
            assert f"`{field.alias or name}`" in text
    [message] = re.findall(r"`\{(code, .*?)\}`", text)
    assert {field_text.strip(" ?") for field_text in message.split(",")} == {
        field.name for field in fields(Message)
    }
    version = get_args(ReportData.model_fields["schema_version"].annotation)
    assert f"# report.json, schema {version[0]}\n" in text


def test_unstable_times_require_reason(report):
    report["steps"][6]["latency"][0]["stable"] = False
    with raises_code("invalid-report", InputError) as excinfo:
        validate_report(report)
    assert message_locations(excinfo.value.messages) == [("missing-reason", "steps.6.latency.0", None)]
