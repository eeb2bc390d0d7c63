"""The step that a verdict recommends, by losses, gates, speed-ups and sizes of a few steps."""

import pytest

from smelt.core.messages import message_codes
from smelt.evaluate.report.schema import validate_report
from smelt.evaluate.report.verdict import decide, shortlisted
from smelt.evaluate.report.verdict_facts import verdict_facts
from tests.support.standins.sample_report import (
    make_gate,
    make_rounds,
    make_scores,
    make_step,
    mark_disturbed,
    ten_step_report,
)

pytestmark = pytest.mark.quick


def _decide(report):
    return decide(validate_report(report))


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
    report["steps"][1]["gates"] = [make_gate("accuracy", passed=True)]  # the user's limit decides
    verdict = _decide(report)
    assert (verdict.step, message_codes(verdict.warnings)) == ("int8", ["loss-without-gate"])
    report["steps"][1]["gates"].append(make_gate("f1", passed=True))
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
    report["steps"][1]["gates"] = [make_gate("bleu", passed=True)]
    assert _decide(report).step == "int8"  # the gate decides


def test_verdict_reports_no_significant_loss_only_with_enough_examples():
    few_verdict, many_verdict = (
        _decide(_branches(("int8", 3.0, [2.9, 3.1], 25, {"bleu": (-1.0, ends, 0.5)}), metrics=("bleu",)))
        for ends in ([-9.0, 7.0], [-2.0, 0.1])
    )
    assert message_codes(few_verdict.warnings) == ["too-few-examples"]
    assert message_codes(many_verdict.warnings) == []
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
            step["gates"] = [make_gate("bleu", passed=True)]
        assert _decide(report).step == expected


def test_smallest_of_equally_fast_steps_is_recommended_if_gates_accept_a_loss_of_all():
    loss = {"bleu": (-1.2, [-1.8, -0.6], 0.002)}
    steps = [("a", 2.0, [1.97, 2.03], 50, loss), ("b", 2.01, [1.98, 2.04], 25, loss)]
    report = _branches(*steps, metrics=("bleu",))
    for step in report["steps"][1:]:
        step["gates"] = [make_gate("bleu", passed=True)]
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
    row.update(cpu_speedup=cpu_speedup, cpu_speedup_ci95=ends, rounds=make_rounds(0.78, 0.81))
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
        (5, 0.6, [make_gate("bleu", passed=False)], "int8"),
        (5, 0.002, [], "int8"),
        (11, 0.6, [make_gate("bleu", passed=False)], None),
    ],
)
def test_smaller_step_that_is_excluded_is_named_if_no_other_is_smaller(size, p_value, gates, closest):
    report = _without_times(("larger", 11, 38.2, 0.0, 1.0), ("int8", size, 36.0, -2.4, p_value))
    report["steps"][2]["gates"] = gates
    verdict = _decide(report)
    assert (verdict.step, verdict.reason, verdict.closest) == (None, "nothing-gained", closest)
    assert closest is None or (closest in verdict.text and verdict.difference.difference == -2.4)


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
    report["steps"][1]["gates"] = [make_gate("agreement", passed=False)]
    assert _decide(report).reason == "gates-failed"


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
