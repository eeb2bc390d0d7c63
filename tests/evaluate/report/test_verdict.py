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
    make_latency,
    make_scores,
    make_step,
    mark_disturbed,
    ten_step_report,
    with_verdict,
)

pytestmark = pytest.mark.quick


@pytest.fixture
def report():
    """The sample, with losses that are not significant, except that of the engine's branch."""
    sample = ten_step_report()
    sample["steps"][6]["gates"] = [gate("bleu", passed=True)]  # onnx-int8
    for step in sample["steps"]:
        for difference in step["against_baseline"].values():
            difference["p_value"] = 0.21
    return sample


def gate(metric, passed):
    return {"metric": metric, "kind": "max_degradation", "limit": 2.0, "value": 1.37, "passed": passed}


def _decide(report):
    return decide(validate_report(report))


def _renderings(report):
    """Return the texts of the three renderings, without line breaks and backslashes."""
    judged_report = with_verdict(report)
    texts = (render_table(judged_report), render_markdown(judged_report), render_html(judged_report))
    return [" ".join(text.split()).replace("\\", "") for text in texts]


def _branches(*steps, metrics=("accuracy", "f1"), n=500):
    """A report of `steps`: (name, speed-up, its interval, MB, {metric: (difference, interval, p)})."""
    report = ten_step_report()
    base = report["steps"][0] | {"size_bytes": 100_000_000}
    all_steps = [base]
    for name, speedup, ends, size, differences in steps:
        new_step = make_step(name, "onnx", "model", "onnx", "ort-cpu", 38.42, 1.0, size, 1)
        new_step["latency"][0].update(speedup=speedup, speedup_ci95=ends)
        new_step["against_baseline"] = {
            metric: {"difference": difference, "ci95": interval, "p_value": p_value, "n": n}
            for metric, (difference, interval, p_value) in differences.items()
        }
        all_steps.append(new_step)
    score = make_scores(80.0)["bleu"] | {"n": n}
    for new_step in all_steps:
        new_step["quality"] = {metric: dict(score) for metric in metrics}
    return report | {"steps": all_steps, "pareto_front": [], "recipe": {"task": "text-classification"}}


SAME = (0.0, [-0.4, 0.4], 1.0)


def test_loss_in_secondary_metric_excludes_step():
    """Accuracy -0.6 (p = 0.5) and macro F1 80 to 52: the rare classes are gone."""
    lossy = {"accuracy": (-0.6, [-1.8, 0.6], 0.5), "f1": (-28.0, [-33.0, -23.0], 1e-9)}
    report = _branches(
        ("int8", 3.0, [2.9, 3.1], 25, lossy), ("fp32", 2.0, [1.9, 2.1], 90, {"accuracy": SAME, "f1": SAME})
    )
    assert _decide(report).step == "fp32"
    report["steps"].pop()
    verdict = _decide(report)
    assert (verdict.step, verdict.reason, verdict.closest) == (None, "significantly-worse", "int8")
    assert "f1: {max_degradation" in verdict.text
    facts = verdict_facts(validate_report(report | {"verdict": verdict.model_dump(mode="json")}))
    losses = [(fact.is_bad, fact.rest) for fact in facts if fact.label == "quality"]
    assert [is_bad for is_bad, _ in losses] == [False, True]
    assert "−28.00* [−33.00, −23.00]" in losses[1][1]
    report["steps"][1]["gates"] = [gate("accuracy", passed=True)]  # the user's limit decides
    verdict = _decide(report)
    assert (verdict.step, message_codes(verdict.warnings)) == ("int8", ["loss-without-gate"])
    report["steps"][1]["gates"].append(gate("f1", passed=True))
    assert message_codes(_decide(report).warnings) == ["accepted-loss"]


def test_listed_tolerance_is_judged_after_agreement():
    differences = {"agreement": SAME, "allclose": (-40.0, [-50.0, -30.0], 1e-9)}
    report = _branches(("int8", 3.0, [2.9, 3.1], 25, differences), metrics=("agreement", "allclose"))
    assert _decide(report).step != "int8"


def test_baseline_agreement_is_ignored_if_references_exist():
    differences = {"spearman": SAME, "agreement": (-1.5, [-1.6, -1.4], 1e-9)}
    report = _branches(("int8", 3.0, [2.9, 3.1], 25, differences), metrics=("spearman", "agreement"))
    assert (_decide(report).step, _decide(report).warnings) == ("int8", [])


@pytest.mark.parametrize(("n", "step", "reason"), [(5, None, "too-few-examples"), (6, "int8", "fastest")])
def test_no_step_is_recommended_with_fewer_than_six_examples(n, step, reason):
    """BLEU 40 to 12 on five sentences has p = 0.06."""
    report = _branches(("int8", 3.0, [2.9, 3.1], 25, {"bleu": (-28.0, None, 0.0625)}), metrics=("bleu",), n=n)
    verdict = _decide(report)
    assert (verdict.step, verdict.reason) == (step, reason)
    report["steps"][1]["gates"] = [gate("bleu", passed=True)]
    assert _decide(report).step == "int8"  # the gate decides


def test_verdict_reports_no_significant_loss_only_with_enough_examples():
    few_verdict, many_verdict = (
        _decide(_branches(("int8", 3.0, [2.9, 3.1], 25, {"bleu": (-1.0, ends, 0.5)}), metrics=("bleu",)))
        for ends in ([-9.0, 7.0], [-2.0, 0.1])
    )
    assert (message_codes(few_verdict.warnings), message_codes(many_verdict.warnings)) == ([FEW], [])
    assert few_verdict.text != many_verdict.text


def test_windows_of_a_text_are_counted_instead_of_tokens():
    loss = {"perplexity": (9.0, None, 0.0625)}
    report = _branches(("int8", 3.0, [2.9, 3.1], 25, loss), metrics=("perplexity",), n=5)
    for step in report["steps"]:
        step["quality"]["perplexity"].update(n=20_000, higher_is_better=False)
    assert _decide(report).reason == "too-few-examples"


@pytest.mark.parametrize(
    ("num_worse", "p_value", "warned"),
    [(19, 0.06, True), (2, 0.06, True), (1, 0.06, False), (19, 0.9, False)],
)
def test_verdict_warns_if_all_other_steps_are_significantly_worse(num_worse, p_value, warned):
    worse_steps = [
        (f"b{i}", 4.0, [3.9, 4.1], 25, {"bleu": (-3.0, [-4.0, -2.0], 0.001)}) for i in range(num_worse)
    ]
    last = ("last", 3.0, [2.9, 3.1], 25, {"bleu": (-1.8, [-3.6, 0.1], p_value)})
    verdict = _decide(_branches(*worse_steps, last, metrics=("bleu",)))
    assert (verdict.step, "best-of-many" in message_codes(verdict.warnings)) == ("last", warned)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ((2.01, [1.98, 2.04], 25, -1.2, 0.002), "good"),  # as fast, smaller and significantly worse
        ((2.01, [1.98, 2.04], 25, -1.2, 0.07), "other"),
        ((2.01, [1.98, 2.04], 95, 0.9, 0.002), "good"),
        ((2.30, [2.25, 2.35], 95, -1.2, 0.002), "other"),  # faster
    ],
)
@pytest.mark.parametrize("lossy_metric", ["bleu", "chrf"])
def test_equally_fast_steps_without_significant_loss_are_preferred_then_the_smallest(
    other, expected, lossy_metric
):
    speedup, ends, size, difference, p_value = other
    change = {lossy_metric: (difference, [difference - 0.6, difference + 0.6], p_value)}
    steps = [
        ("good", 2.0, [1.97, 2.03], 50, {"bleu": SAME, "chrf": SAME}),
        ("other", speedup, ends, size, {"bleu": SAME, "chrf": SAME} | change),
    ]
    for ordered_steps in (steps, steps[::-1]):
        report = _branches(*ordered_steps, metrics=("bleu", "chrf"))
        for step in report["steps"][1:]:
            step["gates"] = [gate("bleu", passed=True)]
        assert _decide(report).step == expected


def test_smallest_of_equally_fast_steps_is_recommended_if_gates_accept_a_loss_of_all():
    loss = {"bleu": (-1.2, [-1.8, -0.6], 0.002)}
    steps = [("a", 2.0, [1.97, 2.03], 50, loss), ("b", 2.01, [1.98, 2.04], 25, loss)]
    report = _branches(*steps, metrics=("bleu",))
    for step in report["steps"][1:]:
        step["gates"] = [gate("bleu", passed=True)]
    accepted = _decide(report)
    assert (accepted.step, accepted.equally_fast) == ("b", ["a"])
    report["steps"][1]["against_baseline"]["bleu"]["p_value"] = 0.3
    assert _decide(report).step == "a"
    assert accepted.text.replace("b ", "a ") != _decide(report).text.replace("b ", "a ")


@pytest.mark.parametrize(
    ("speedup", "ends", "size", "reason", "codes"),
    [
        (1.004, [1.001, 1.007], 100, "nothing-gained", []),
        (1.05, [1.04, 1.06], 100, "fastest", []),
        (1.004, [1.001, 1.007], 99.5, "nothing-gained", []),
        (0.79, [0.78, 0.81], 40, "smallest", ["slower"]),
        (0.98, [0.94, 1.02], 40, "smallest", []),
    ],
)
def test_speedup_below_two_percent_is_no_gain_and_slower_step_is_reported(speedup, ends, size, reason, codes):
    report = _branches(("onnx", speedup, ends, size, {"bleu": SAME}), metrics=("bleu",))
    verdict = _decide(report)
    assert (verdict.reason, message_codes(verdict.warnings)) == (reason, codes)


@pytest.mark.parametrize(
    ("cpu_speedup", "codes"),
    [(0.5, ["slower", "unreliable-speed"]), (0.97, ["unreliable-speed"]), (None, ["unreliable-speed"])],
)
@pytest.mark.parametrize("has_calm_step", [True, False])
def test_disturbed_speed_of_the_smallest_step_is_unknown_and_cpu_time_shows_a_slower_one(
    has_calm_step, cpu_speedup, codes
):
    calm_step = ("fp32", 0.99, [0.98, 1.0], 100, {"bleu": SAME})
    small_step = ("int8", 0.79, [0.78, 0.81], 40, {"bleu": SAME})
    report = _branches(small_step, *[calm_step] * has_calm_step, metrics=("bleu",))
    row = report["steps"][1]["latency"][0]
    mark_disturbed(row)
    ends = cpu_speedup and [cpu_speedup, cpu_speedup]
    row.update(cpu_speedup=cpu_speedup, cpu_speedup_ci95=ends, rounds=_rounds(0.78, 0.81))
    verdict = _decide(report)
    assert (verdict.step, verdict.reason, verdict.speedup) == ("int8", "smallest", None)
    assert message_codes(verdict.warnings) == codes


@pytest.mark.parametrize(("repetitive", "codes"), [(40, ["degenerate-outputs"]), (9, [])])
def test_verdict_warns_of_degenerate_outputs_even_if_baseline_has_them(repetitive, codes):
    """An untrained chat model answers "to the the the" to all, and exports without any loss."""
    report = _branches(("onnx-fp32", 3.0, [2.9, 3.1], 25, {"rougeL": SAME}), metrics=("rougeL",))
    for step in report["steps"]:
        step["outputs"] = {"n": 40, "repetitive": repetitive, "not_ended": 0, "same": 0}
    verdict = _decide(report)
    assert (verdict.step, message_codes(verdict.warnings)) == ("onnx-fp32", codes)


def test_warns_of_a_metric_without_a_test():
    report = _branches(
        ("int8", 3.0, [2.9, 3.1], 25, {"accuracy": SAME, "own:metric": (-30.0, None, 1.0)}),
        metrics=("accuracy", "own:metric"),
    )
    report["steps"][1]["against_baseline"]["own:metric"]["n"] = 1
    verdict = _decide(report)
    assert (verdict.step, message_codes(verdict.warnings)) == ("int8", ["metric-not-judged"])


def _rounds(*speedups):
    idle = {"counted": False, "processor_share": 1.0, "baseline_processor_share": 1.0, "lost_share": 0.4}
    idle |= {"baseline_ms": 100.0, "other_processors": 0.5, "cpu_steal": 0.0, "pressure": None}
    return [idle | {"speedup": speedup} for speedup in speedups]


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
        ({"gates": [gate("bleu", passed=False)]}, "onnx-fp32"),
        ({"gates": [gate("bleu", passed=None) | {"reason": "no GPU"}]}, "onnx-int8"),
        ({"p_value": 0.002, "gates": []}, "onnx-fp32"),  # significantly worse
        ({"p_value": 0.002, "gates": [gate("size_bytes", passed=True)]}, "onnx-fp32"),
        ({"p_value": 0.002, "gates": [gate("bleu", passed=True)]}, "onnx-int8"),  # its gate allows that
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
        step["gates"] = [gate("bleu", passed) | {"reason": "no GPU"}]
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
        (lambda step: step.update(gates=[gate("bleu", passed=False)]), "gates-failed", "control"),
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


def _without_times(*steps, task="translation"):
    """A report of `steps`, (name, MB, BLEU, difference, p), whose baseline has 10 MB; nothing was timed."""
    report = ten_step_report()
    all_steps = [make_step("model", "model", None, "torch", None, 38.42, 84.3, 10, 1)]
    for name, size, value, difference, p_value in steps:
        new_step = make_step(name, "onnx", "model", "onnx", "ort-cpu", value, 1.0, size, 1)
        new_step["against_baseline"] = {"bleu": {"difference": difference, "ci95": None, "p_value": p_value}}
        all_steps.append(new_step)
    for new_step in all_steps:
        new_step["latency"] = []
    return report | {"steps": all_steps, "pareto_front": [], "recipe": {"task": task}}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([("a", 9, 38.0, -0.2, 0.6), ("b", 5, 38.0, -0.2, 0.6), ("c", 7, 38.0, -0.2, 0.6)], "b"),
        ([("whole", 9, 38.2, 0.0, 1.0), ("bad", 2, 31.3, -7.0, 0.002)], "whole"),
        ([("better", 9, 39.2, 1.0, 0.01), ("bad", 2, 31.3, -7.0, 0.002)], "better"),
        ([("noise", 2, 38.4, -1e-8, 0.001)], "noise"),  # the order of additions
        ([("larger", 11, 38.2, 0.0, 1.0)], None),
        ([("a thousandth smaller", 9.99, 38.2, 0.0, 1.0)], None),
    ],
)
def test_smallest_step_is_recommended_without_times(steps, expected):
    report = _without_times(*steps)
    assert _decide(report).step == expected
    assert _decide(report).reason == ("smallest" if expected else "nothing-gained")
    # a smaller checkpoint is not what an export was made for
    torch = report["steps"][1] | {"name": "torch", "format": "torch", "target": None, "size_bytes": 10}
    report["steps"].append(torch)
    assert _decide(report).step == (expected or "torch")


@pytest.mark.parametrize(
    ("size", "p_value", "gates", "closest"),
    [
        (5, 0.6, [gate("bleu", passed=False)], "int8"),
        (5, 0.002, [], "int8"),
        (11, 0.6, [gate("bleu", passed=False)], None),
    ],
)
def test_smaller_step_that_is_excluded_is_named_if_no_other_is_smaller(size, p_value, gates, closest):
    report = _without_times(("larger", 11, 38.2, 0.0, 1.0), ("int8", size, 36.0, -2.4, p_value))
    report["steps"][2]["gates"] = gates
    verdict = _decide(report)
    assert (verdict.step, verdict.reason, verdict.closest) == (None, "nothing-gained", closest)
    assert closest is None or (closest in verdict.text and verdict.difference.difference == -2.4)


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
    ("differences", "is_accepted"),
    [
        ({"agreement": -0.3}, True),
        ({"agreement": -1.2}, False),
        ({"agreement": -0.3, "top1": -8.0}, False),
        ({"agreement": -0.3, "relative_error": 4.0}, True),
        ({"relative_error": 4.0}, False),
        ({"relative_error": 0.5}, True),
        ({"accuracy": -0.3}, False),  # the baseline is not right by definition
    ],
)
def test_small_agreement_loss_is_accepted(differences, is_accepted):
    report = _without_times(("int8", 3, 99.0, -0.3, 0.001), task="custom")
    score = make_scores(99.0)["bleu"]
    for step in report["steps"]:
        step["quality"] = {m: score | {"higher_is_better": m != "relative_error"} for m in differences}
    report["steps"][1]["against_baseline"] = {
        metric: {"difference": value, "ci95": None, "p_value": 0.001} for metric, value in differences.items()
    }
    verdict = _decide(report)
    assert (verdict.step, verdict.reason) == (
        ("int8", "smallest") if is_accepted else (None, "significantly-worse")
    )
    if is_accepted:
        assert verdict.command == "cp -rL artifacts/int8 NEW"
        assert message_codes(verdict.warnings) == ["accepted-loss"]
    report["steps"][1]["gates"] = [gate("agreement", passed=False)]
    assert _decide(report).reason == "gates-failed"


@pytest.mark.parametrize(
    ("speedups", "named"), [((1.9, 3.1, 5.6), True), ((1.9, 3.1, 5.7), False), ((None, None), False)]
)
def test_disturbed_step_blocks_speed_claim_only_if_it_may_be_fastest(report, speedups, named):
    row = report["steps"][7]["latency"][0]  # onnx-fp32, compared with onnx-int8's 5.94 [5.70, 6.23]
    mark_disturbed(row)
    row["rounds"] = _rounds(*speedups)
    verdict = _decide(report)
    assert (verdict.step, verdict.reason) == ("onnx-int8", "fastest" if named else "smallest")
    assert verdict.speedup == pytest.approx(5.94, abs=0.01)  # its own times were not disturbed
    assert ("unreliable-speed" not in message_codes(verdict.warnings)) == named


def test_disturbed_ineligible_step_does_not_block_speed_claim(report):
    for step_index in (5, 0, 7):  # quantize; the baseline; onnx-fp32, which fails a gate
        mark_disturbed(report["steps"][step_index]["latency"][0])
    report["steps"][7]["gates"] = [gate("bleu", passed=False)]
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
    candidate["gates"] = [gate(metric, passed=True)]
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
    report["steps"][6]["gates"] = [gate("bleu", passed=True) | {"undecided": True}]
    assert _decide(report).step == "onnx-int8"
    report["steps"][0]["test"] = {"quality": make_scores(37.0), "against_baseline": {}, "gates": []}
    difference = {"bleu": {"difference": -3.0, "ci95": [-4.0, -2.0], "p_value": 0.001}}
    report["steps"][6]["test"] = {
        "quality": make_scores(34.0),
        "against_baseline": difference,
        "gates": [gate("bleu", passed=False) | {"value": 3.0}],
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
        step["gates"] = [gate("bleu", passed=True) | {"undecided": undecided}]
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


def test_verdict_names_the_steps_that_are_as_fast():
    steps = [("a", 3.0, [2.9, 3.1], 25), ("b", 2.95, [2.94, 2.96], 20), ("c", 2.5, [2.45, 2.52], 10)]
    report = _branches(*((*step, {"accuracy": SAME}) for step in steps), metrics=("accuracy",))
    verdict = _decide(report)
    assert verdict.step == "b"  # as good and smaller
    assert verdict.equally_fast == ["a"]
    assert "a" in verdict.text.split()
    assert "a" in shortlisted(validate_report(report))  # its score on test stands next to the other's
    assert "c" not in verdict.text.split()
    report["steps"][1]["latency"][0].update(speedup_ci95=[2.99, 3.01])  # no overlap, but less than 2 %
    assert _decide(report).step == "b"
    report["steps"][2]["latency"][0].update(speedup=2.9, speedup_ci95=[2.89, 2.91])
    assert _decide(report).step == "a"


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
        step["gates"] = [gate("bleu", passed=False)]
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
