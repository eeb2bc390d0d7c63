"""The verdict that stands first in every rendering of a report."""

import re

import pytest

from smelt.core.messages import message_codes
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html, render_table
from smelt.evaluate.report.schema import validate_report
from smelt.evaluate.report.verdict import decide, limited_run_text, pareto_front, shortlisted
from smelt.evaluate.report.verdict_facts import verdict_facts
from tests.support.standins.sample_report import (
    make_gate,
    make_latency,
    make_rounds,
    make_scores,
    mark_disturbed,
    ten_step_report,
    with_verdict,
)

pytestmark = pytest.mark.quick


@pytest.fixture
def report():
    """The sample, with losses that are not significant, except that of the engine's branch."""
    sample = ten_step_report()
    sample["steps"][6]["gates"] = [make_gate("bleu", passed=True)]  # onnx-int8
    for step in sample["steps"]:
        for difference in step["against_baseline"].values():
            difference["p_value"] = 0.21
    return sample


def _decide(report):
    return decide(validate_report(report))


def _renderings(report):
    """Return the texts of the three renderings, without line breaks and backslashes."""
    judged_report = with_verdict(report)
    texts = (render_table(judged_report), render_markdown(judged_report), render_html(judged_report))
    return [" ".join(text.split()).replace("\\", "") for text in texts]


def test_verdict_contains_loss_gain_folder_and_command(report):
    report["steps"][6]["against_baseline"]["bleu"]["p_value"] = 0.002
    verdict = _decide(report)
    step, row = report["steps"][6], report["steps"][6]["latency"][0]
    assert (verdict.step, verdict.reason, verdict.closest) == ("onnx-int8", "fastest", None)
    assert (verdict.metric, verdict.value) == ("bleu", step["quality"]["bleu"]["value"])
    assert verdict.difference.model_dump(include={"difference", "p_value"}) == {
        "difference": step["against_baseline"]["bleu"]["difference"],
        "p_value": 0.002,
    }
    assert (verdict.batch_size, verdict.speedup, list(verdict.speedup_ci95)) == (
        1,
        row["speedup"],
        row["speedup_ci95"],
    )
    assert (verdict.size_bytes, verdict.size_ratio) == (step["size_bytes"], pytest.approx(25.1 / 131.6))
    assert (verdict.folder, verdict.command) == ("artifacts/onnx-int8", "smelt package artifacts/onnx-int8")
    assert message_codes(verdict.warnings) == ["accepted-loss"]
    facts = {fact.label: fact for fact in verdict_facts(validate_report(with_verdict(report)))}
    assert (facts["speed"].value, facts["size"].value) == ("84.3 → 14.2 ms", "132 → 25.1 MB")
    assert "5.94× [5.70, 6.23], torch → onnxruntime, batch 1, 1 thread" in facts["speed"].rest
    assert "19 %" in facts["size"].rest
    assert facts["quality"].value == "38.42 → 37.05 BLEU"
    assert "−1.37* [−1.72, −1.02], p = 0.002 (test, n = 1,000)" in facts["quality"].rest
    assert (facts["gates"].value, facts["gates"].is_bad) == ("passed", False)
    assert "1.37 worse (at most 2.00 worse)" in facts["gates"].rest
    renderings = _renderings(report)
    assert all(fact.value in page for fact in facts.values() for page in renderings)
    assert all(text in page for text in (verdict.text, str(verdict.warnings[0])) for page in renderings)
    assert all(verdict.command in page for page in renderings[1:])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "onnx-int8"),
        ({"deployable": False}, "onnx-fp32"),  # nobody would deploy it
        ({"artifact": None}, "onnx-fp32"),
        ({"gates": [make_gate("bleu", passed=False)]}, "onnx-fp32"),
        ({"gates": [make_gate("bleu", passed=None) | {"reason": "no GPU"}]}, "onnx-int8"),
        ({"p_value": 0.002, "gates": []}, "onnx-fp32"),  # significantly worse
        ({"p_value": 0.002, "gates": [make_gate("size_bytes", passed=True)]}, "onnx-fp32"),
        ({"p_value": 0.002, "gates": [make_gate("bleu", passed=True)]}, "onnx-int8"),  # its gate allows that
        ({"chance": 38.0}, "onnx-fp32"),
        ({"quality": {}, "against_baseline": {}}, "onnx-fp32"),
        ({"latency": []}, "onnx-fp32"),
        ({"speedup": 1.5, "speedup_ci95": [1.4, 1.6]}, "onnx-fp32"),
    ],
)
def test_fastest_eligible_step_is_recommended(report, change, expected):
    step = report["steps"][6]
    for name, value in change.items():
        entry = step["latency"][0] if "speedup" in name else step
        entry = step["against_baseline"]["bleu"] if name == "p_value" else entry
        entry = step["quality"]["bleu"] if name == "chance" else entry
        entry[name] = value
    assert _decide(report).step == expected


def test_unjudged_gate_is_not_reported_as_passed(report):
    [step] = [step for step in report["steps"] if step["name"] == "onnx-int8"]
    texts = set()
    for passed in (True, None):
        step["gates"] = [make_gate("bleu", passed) | {"reason": "no GPU"}]
        texts.add(_decide(report).text)
    assert len(texts) == 2


def test_baseline_and_larger_batches_are_ignored(report):
    for step in report["steps"]:
        step["latency"].reverse()
    for step_index, row_index in (
        (0, 1),
        (5, 1),
        (7, 0),
    ):  # the baseline, an emulated step, and batch 8 of onnx-fp32
        report["steps"][step_index]["latency"][row_index].update(speedup=50.0, speedup_ci95=[49.0, 51.0])
    assert _decide(report).step == "onnx-int8"


@pytest.mark.parametrize(
    ("change", "reason", "closest"),
    [
        (lambda step: step.update(deployable=False), "no-deployable-step", None),
        (lambda step: step.update(against_baseline={}), "not-scored", None),
        (lambda step: step["quality"]["bleu"].update(chance=99.0), "at-chance", None),
        (lambda step: step.update(gates=[make_gate("bleu", passed=False)]), "gates-failed", "control"),
        (
            lambda step: step["against_baseline"]["bleu"].update(difference=-1.0, ci95=None, p_value=0.01),
            "significantly-worse",
            "control",  # the best score
        ),
        (
            lambda step: step.update(size_bytes=200_000_000, latency=[make_latency(99.0, 84.3, 1)]),
            "nothing-gained",
            None,
        ),
    ],
)
def test_verdict_without_step_reports_reason(report, change, reason, closest):
    for step in report["steps"][1:8]:
        step["gates"] = []
        change(step)
    verdict = _decide(report)
    assert (verdict.step, verdict.reason, verdict.closest, verdict.command) == (None, reason, closest, None)
    assert closest is None or closest in verdict.text


def test_best_step_is_named_if_all_are_at_chance(report):
    for step in report["steps"]:
        step["gates"] = []
        if step["quality"]:
            step["quality"]["bleu"].update(chance=99.0)
    report["steps"][4]["quality"]["bleu"]["value"] = 60.0
    assert f"{report['steps'][4]['name']}: BLEU 60.00" in _decide(report).text


def test_verdict_supports_lower_is_better_metrics(report):
    for step in report["steps"][1:]:
        for score in step["quality"].values():
            score["higher_is_better"] = False
    report["steps"][6]["against_baseline"]["bleu"].update(p_value=0.01)
    report["steps"][6]["gates"] = []
    assert _decide(report).step == "onnx-int8"  # significantly lower
    report["steps"][6]["against_baseline"]["bleu"].update(difference=1.0, ci95=None)
    assert _decide(report).step == "onnx-fp32"


@pytest.mark.parametrize(
    ("speedups", "named"), [((1.9, 3.1, 5.6), True), ((1.9, 3.1, 5.7), False), ((None, None), False)]
)
def test_disturbed_step_blocks_speed_claim_only_if_it_may_be_fastest(report, speedups, named):
    row = report["steps"][7]["latency"][0]  # onnx-fp32, compared with onnx-int8's 5.94 [5.70, 6.23]
    mark_disturbed(row)
    row["rounds"] = make_rounds(*speedups)
    verdict = _decide(report)
    assert (verdict.step, verdict.reason) == ("onnx-int8", "fastest" if named else "smallest")
    assert verdict.speedup == pytest.approx(5.94, abs=0.01)  # its own times were not disturbed
    assert ("unreliable-speed" not in message_codes(verdict.warnings)) == named


def test_disturbed_ineligible_step_does_not_block_speed_claim(report):
    for step_index in (5, 0, 7):  # quantize; the baseline; onnx-fp32, which fails a gate
        mark_disturbed(report["steps"][step_index]["latency"][0])
    report["steps"][7]["gates"] = [make_gate("bleu", passed=False)]
    assert _decide(report).reason == "fastest"


@pytest.mark.parametrize(
    ("fp32", "ends", "loss", "expected"),
    [
        (2.0, [1.9, 2.1], -1.11, "onnx-int8"),
        (7.4, [7.3, 7.5], -1.37, "onnx-int8"),  # what cannot be told from the fastest may be smaller
        (9.0, [6.0, 13.0], -1.11, "onnx-int8"),
        (9.0, [8.9, 9.1], -1.37, "onnx-fp32"),
    ],
)
def test_cpu_time_decides_if_wall_time_was_disturbed(report, fp32, ends, loss, expected):
    report["steps"][7]["against_baseline"]["bleu"].update(difference=loss, ci95=[loss - 0.35, loss + 0.35])
    for step, ratio, ratio_ends in ((report["steps"][6], 7.0, [6.8, 7.2]), (report["steps"][7], fp32, ends)):
        mark_disturbed(step["latency"][0])
        step["latency"][0].update(cpu_speedup=ratio, cpu_speedup_ci95=ratio_ends, rounds=[])
    verdict = _decide(report)
    assert (verdict.step, verdict.reason) == (expected, "fastest-by-cpu-time")
    assert verdict.speedup == (7.0 if expected == "onnx-int8" else fp32)
    assert verdict.warnings[-1].code == "unreliable-speed"
    assert report["steps"][6]["latency"][0]["reason"] in str(verdict.warnings[-1])


FEW, WORSE, ACCEPTED = "too-few-examples", "significantly-worse", "accepted-loss"


@pytest.mark.parametrize(
    ("metric", "value", "difference", "ends", "p_value", "n", "code"),
    [
        ("bleu", 29.7, -7.5, [-16.0, 1.0], 0.09, 30, FEW),
        ("bleu", 37.0, -0.4, [-1.5, 0.4], 0.4, 30, None),  # four of a hundred
        ("bleu", 45.0, 7.6, [-2.0, 16.0], 0.09, 30, FEW),
        ("bleu", 37.0, -2.4, [-4.0, -0.9], 0.01, 30, ACCEPTED),
        ("bleu", 37.0, 0.0, [0.0, 0.0], 1.0, 2, FEW),  # drawn from two
        ("bleu", 37.0, 0.0, [0.0, 0.0], 1.0, 20, None),
        ("perplexity", 95.0, 9.0, [-1.0, 19.0], 0.09, 90, FEW),
        ("bleu", 37.0, -0.4, [-0.5, -0.3], 0.25, 30, FEW),
        ("bleu", 37.0, 0.4, [0.3, 0.5], 0.25, 30, None),
        ("bleu", 37.0, -0.4, None, 0.25, 500, FEW),
        ("perplexity", 77.0, -9.0, [-19.0, 1.0], 0.09, 90, None),  # lower is better: one more of 86
    ],
)
def test_verdict_reports_uncertainty_of_few_samples(
    report, metric, value, difference, ends, p_value, n, code
):
    for step in report["steps"]:
        step["quality"] = {metric: make_scores(38.4)["bleu"] | {"higher_is_better": metric == "bleu"}}
        step["against_baseline"] = {}
    candidate = report["steps"][6]
    candidate["quality"][metric] |= {"value": value, "n": n}
    candidate["against_baseline"] = {metric: {"difference": difference, "ci95": ends, "p_value": p_value}}
    candidate["gates"] = [make_gate(metric, passed=True)]
    verdict = _decide(report)
    assert (verdict.step, message_codes(verdict.warnings)) == ("onnx-int8", [code] if code else [])


def test_verdict_reports_test_loss_of_step_chosen_on_validation(report):
    test_difference = {"bleu": {"difference": -3.0, "ci95": [-4.0, -2.0], "p_value": 0.001}}
    report["judged_on"], report["steps"][6]["gates"] = "validation", []
    chain = ["quantize", "small", "prune", "distill"]  # the steps that onnx-int8 comes from
    assert set(shortlisted(validate_report(report))) == {"model", *report["pareto_front"], *chain}
    assert "onnx-int8" in report["pareto_front"]
    tested = {
        "quality": make_scores(34.0),
        "against_baseline": test_difference,
        "gates": [],
    }
    report["steps"][0]["test"] = {"quality": make_scores(37.0), "against_baseline": {}, "gates": []}
    report["steps"][6]["test"] = tested
    verdict = _decide(report)
    assert (verdict.step, verdict.value, verdict.difference.difference) == ("onnx-int8", 34.0, -3.0)
    assert message_codes(verdict.warnings) == [WORSE]
    [quality] = [f for f in verdict_facts(validate_report(with_verdict(report))) if f.label == "quality"]
    assert quality.value == "37.00 → 34.00 BLEU"  # both of test


def test_step_that_fails_its_gate_on_test_is_not_recommended(report):
    """Another step would be chosen on test; its score there would be too optimistic."""
    report["judged_on"] = "validation"
    report["steps"][6]["gates"] = [make_gate("bleu", passed=True) | {"undecided": True}]
    assert _decide(report).step == "onnx-int8"
    report["steps"][0]["test"] = {"quality": make_scores(37.0), "against_baseline": {}, "gates": []}
    difference = {"bleu": {"difference": -3.0, "ci95": [-4.0, -2.0], "p_value": 0.001}}
    report["steps"][6]["test"] = {
        "quality": make_scores(34.0),
        "against_baseline": difference,
        "gates": [make_gate("bleu", passed=False) | {"value": 3.0}],
    }
    verdict = _decide(report)
    assert (verdict.step, verdict.reason, verdict.closest) == (None, "gates-failed", "onnx-int8")
    assert verdict.value == 34.0
    [gates] = [f for f in verdict_facts(validate_report(with_verdict(report))) if f.label == "gates"]
    assert (gates.value, gates.is_bad) == ("failed", True)
    assert all("passed" not in text for text in (gates.text, verdict.text))


def test_gate_with_interval_beyond_its_limit_is_not_called_passed(report):
    [step] = [step for step in report["steps"] if step["name"] == "onnx-int8"]
    texts = set()
    for undecided in (False, True):
        step["gates"] = [make_gate("bleu", passed=True) | {"undecided": undecided}]
        judged_report = with_verdict(report)
        assert judged_report["verdict"]["step"] == "onnx-int8"
        [gates] = [f for f in verdict_facts(validate_report(judged_report)) if f.label == "gates"]
        assert (gates.value == "passed") is not undecided
        assert ("passed" in judged_report["verdict"]["text"] + gates.text) is not undecided
        texts.add(gates.text)
    assert len(texts) == 2


def test_graph_for_gpus_that_was_measured_on_the_cpu_is_no_candidate(report):
    """The builder sets `deployable`; the reports name the runtime that timed it."""
    step = report["steps"][6]
    step |= {"target": "tensorrt", "device": "cpu", "deployable": False}
    report["pareto_front"] = pareto_front(report["steps"], "model")
    assert "onnx-int8" not in report["pareto_front"]
    assert _decide(report).step == "onnx-fp32"
    for rendering in _renderings(report):
        assert "in onnxruntime on the CPU" in rendering
    for other in report["steps"][1:8]:
        other["deployable"] = False
    assert "onnx-int8" in _decide(report).text


def test_recommended_step_is_scored_on_test_without_times(report):
    for step in report["steps"]:
        step["latency"] = []
    report["pareto_front"] = pareto_front(report["steps"], "model")
    names = shortlisted(validate_report(report))
    assert names == ["model", "onnx-int8", "quantize", "small", "prune", "distill"]


@pytest.mark.parametrize(
    ("limit", "rows", "count"),
    [
        (64, {"train": 64, "test": 48}, 48),
        (1, {"test": 1}, 1),
        (5000, {"train": 300, "test": 48}, None),  # more than there are: nothing was left out
        (None, {"test": 48}, None),
    ],
)
def test_limited_run_is_reported_as_trial(report, limit, rows, count):
    report["recipe"].update(limit=limit, rows=rows)
    trial = limited_run_text(validate_report(report))
    assert re.findall(r"\d+", trial or "") == ([] if count is None else [str(count)])


def test_trial_note_and_missing_step_reason_are_in_every_rendering(report):
    report["recipe"].update(limit=64, rows={"train": 64, "test": 48})
    for step in report["steps"][1:8]:
        step["gates"] = [make_gate("bleu", passed=False)]
    verdict = _decide(report)
    assert verdict.reason == "gates-failed"
    trial = limited_run_text(validate_report(report))
    assert all(text in page for text in (verdict.text, trial) for page in _renderings(report))


def test_shared_disturbance_reasons_are_reported_once(report):
    for step in (report["steps"][4], report["steps"][6]):
        mark_disturbed(step["latency"][0])
        step["latency"][0]["rounds"] = []
    report["steps"][6]["latency"][0].update(cause="disagree", reason="the rounds disagree")
    warning_text = str(_decide(report).warnings[-1])
    assert f"{report['steps'][4]['name']}, onnx-int8" in warning_text
    assert warning_text.count("other work") == warning_text.count("the rounds disagree") == 1
