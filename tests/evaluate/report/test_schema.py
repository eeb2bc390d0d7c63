"""What a report must hold, and what is said of one that does not."""

import json
import re
from pathlib import Path

import pytest
import sample_report
from sample_report import sample

from smelt.core.errors import InputError
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


@pytest.fixture
def report():
    return sample()


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


@pytest.fixture
def unscored():
    return sample_report.unscored()


def test_gate_that_was_not_judged_must_say_why(unscored):
    unscored["steps"][8]["gates"][0]["reason"] = None
    with pytest.raises(InputError, match="not judged needs a 'reason'"):
        validate_report(unscored)


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


def test_times_that_are_not_stable_must_say_why(report):
    report["steps"][6]["latency"][0]["stable"] = False
    with pytest.raises(InputError, match="not stable need a 'reason'"):
        validate_report(report)
