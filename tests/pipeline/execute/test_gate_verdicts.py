"""Gates: on the value, on the bound of its interval, and whether n is large enough to see anything."""

import numpy as np
import pytest

from smelt.evaluate.quality import score_labels, score_texts, score_windows
from smelt.evaluate.significance import compare_steps, difference_interval, metric_interval
from smelt.pipeline.execute.report_builder import (
    GateStatistics,
    examples_needed,
    judge_gate,
    smallest_batch_row,
)
from smelt.pipeline.plan.plan import PlannedGate

pytestmark = pytest.mark.quick

DRAW = np.random.default_rng(0)
GOLD = DRAW.integers(0, 2, size=400)
BASE = np.where(DRAW.random(400) < 0.9, GOLD, 1 - GOLD)
OWN = np.where(DRAW.random(400) < 0.03, 1 - BASE, BASE)
SCORES = [score_labels(["accuracy"], list(p), list(GOLD))["accuracy"] for p in (OWN, BASE)]
OF_OWN, OF_BASE = (score.statistics for score in SCORES)
EVIDENCE = GateStatistics({"accuracy": OF_OWN.dump()}, {"accuracy": OF_BASE.dump()})


def gate(metric="accuracy", kind="max_degradation", limit=1.0, confidence=None):
    return PlannedGate(metric, kind, limit, ("it",), confidence)


def step(**changes):
    row = {"batch_size": 1, "speedup": 2.0, "stable": True, "cause": None, "reason": None}
    row["rounds"] = [{"counted": c, "speedup": r} for c, r in ((1, 1.9), (1, 2.1), (1, 2.0), (0, 0.1))]
    step_report = {
        "status": "done",
        "cause": None,
        "reason": None,
        "error": None,
        "size_bytes": 10,
        "quality": {"accuracy": SCORES[0].to_report()},
        "against_baseline": {"accuracy": compare_steps(OF_OWN, OF_BASE)},
        "latency": [{"batch_size": 8, "speedup": 9.0, "stable": True}, row],
    }
    return {**step_report, **changes}


def test_gate_without_confidence_compares_value():
    drop = -compare_steps(OF_OWN, OF_BASE)["difference"]
    assert 0 < drop < 5
    assert judge_gate(gate(limit=drop + 0.01), step(), EVIDENCE)["passed"]
    verdict = judge_gate(gate(limit=drop - 0.01), step(), EVIDENCE)
    assert (verdict["passed"], verdict["bound"], verdict["value"]) == (False, None, drop)


def test_gate_with_confidence_compares_interval_bound():
    drop = -compare_steps(OF_OWN, OF_BASE)["difference"]
    bound = -difference_interval(OF_OWN, OF_BASE, 0.95)[0]
    assert bound == -compare_steps(OF_OWN, OF_BASE)["ci95"][0]
    assert bound > drop + 0.5
    verdict = judge_gate(gate(limit=drop + 0.1, confidence=0.95), step(), EVIDENCE)
    assert (verdict["passed"], verdict["value"], verdict["bound"]) == (False, drop, bound)
    assert judge_gate(gate(limit=bound, confidence=0.95), step(), EVIDENCE)["passed"]
    assert judge_gate(gate(limit=bound, confidence=0.99), step(), EVIDENCE)["passed"] is False


@pytest.mark.parametrize(("kind", "limit"), [("max_degradation", 100.0), ("min", 0.0), ("max", 100.0)])
@pytest.mark.parametrize(("n", "confidence", "least"), [(1, 0.95, 6), (5, 0.95, 6), (7, 0.99, 8)])
def test_gate_with_confidence_is_not_judged_on_few_examples(kind, limit, n, confidence, least):
    texts = [["a man ran"] * n, ["a dog"] * n]
    scores = [score_texts(["bleu"], text, [["a man and a dog run"]] * n)["bleu"] for text in texts]
    own_statistics, base = (score.statistics for score in scores)
    step_report = step(
        quality={"bleu": scores[0].to_report()},
        against_baseline={"bleu": compare_steps(own_statistics, base)},
    )
    evidence = GateStatistics({"bleu": own_statistics.dump()}, {"bleu": base.dump()})
    verdict = judge_gate(gate("bleu", kind, limit, confidence), step_report, evidence)
    assert (verdict["passed"], verdict["bound"], verdict["n_needed"]) == (None, None, None)
    assert verdict["cause"] == "too-few-examples"
    assert all(value in verdict["reason"] for value in (f"{n} example", f"{confidence:g}", f" {least} "))
    assert judge_gate(gate("bleu", kind, limit), step_report, evidence)["passed"]  # the value alone
    unreachable_gate = gate(
        "bleu", kind, {"max_degradation": -50.0, "min": 100.0, "max": -1.0}[kind], confidence
    )
    failed = judge_gate(unreachable_gate, step_report, evidence)  # which no number of examples would mend
    assert (failed["passed"], failed["bound"], failed["cause"]) == (False, None, None)


@pytest.mark.parametrize(
    ("metric", "n", "passed"), [("bleu", 8, False), ("rouge1", 8, False), ("bleu", 400, True)]
)
def test_unchanged_outputs_pass_confidence_gate_only_with_enough_examples(metric, n, passed):
    """As accuracy does: of 8 equal outputs 32 points may be lost, of 400 one."""
    score = score_texts([metric], ["a man and a dog run"] * n, [["a man and a cat run"]] * n)[metric]
    same = score.statistics
    step_report = step(
        quality={metric: score.to_report()}, against_baseline={metric: compare_steps(same, same)}
    )
    evidence = GateStatistics({metric: same.dump()}, {metric: same.dump()})
    verdict = judge_gate(gate(metric, "max_degradation", 1.0, 0.95), step_report, evidence)
    assert (verdict["passed"], verdict["value"]) == (passed, 0.0)
    assert verdict["bound"] > 0


def test_perplexity_of_equal_windows_is_not_judged_with_confidence():
    score = score_windows(["perplexity"], [900.0] * 9, [400] * 9, [1200] * 9, "window:400", ["x"])[
        "perplexity"
    ]
    same = score.statistics
    step_report = step(
        quality={"perplexity": score.to_report()}, against_baseline={"perplexity": compare_steps(same, same)}
    )
    evidence = GateStatistics({"perplexity": same.dump()}, {"perplexity": same.dump()})
    verdict = judge_gate(gate("perplexity", "max_degradation", 1.0, 0.95), step_report, evidence)
    assert (verdict["passed"], verdict["cause"]) == (None, "too-few-differences")
    assert judge_gate(gate("perplexity", "max_degradation", 1.0), step_report, evidence)["passed"]


def test_few_windows_are_not_judged_with_confidence():
    scores = score_windows(["perplexity"], [900.0] * 5, [400] * 5, [1200] * 5, "window:400", ["x"])
    statistics = scores["perplexity"].statistics
    step_report = step(quality={"perplexity": scores["perplexity"].to_report()}, against_baseline={})
    evidence = GateStatistics({"perplexity": statistics.dump()}, {"perplexity": statistics.dump()})
    verdict = judge_gate(gate("perplexity", "max_degradation", 1.0, 0.95), step_report, evidence)
    assert verdict["cause"] == "too-few-examples"
    assert all(value in verdict["reason"] for value in ("5 windows", "0.95", " 6 "))


def test_score_bound_is_lower_end_or_upper_if_lower_is_better():
    low, high = metric_interval(OF_OWN, 0.9)
    verdict = judge_gate(gate(kind="min", limit=low, confidence=0.9), step(), EVIDENCE)
    assert (verdict["passed"], verdict["bound"]) == (True, low)
    assert judge_gate(gate(kind="min", limit=low + 0.01, confidence=0.9), step(), EVIDENCE)["passed"] is False
    assert judge_gate(gate(kind="max", limit=high, confidence=0.9), step(), EVIDENCE)["bound"] == high


def test_rise_is_bounded_from_above_if_lower_is_better():
    turned = step()
    turned["quality"] = {"accuracy": SCORES[0].to_report() | {"higher_is_better": False}}
    verdict = judge_gate(gate(limit=9, confidence=0.95), turned, EVIDENCE)
    assert verdict["bound"] == compare_steps(OF_OWN, OF_BASE)["ci95"][1]


def test_speedup_bound_is_lower_end_over_counted_rounds():
    from smelt.evaluate.latency.summary import mean_speedup

    low = mean_speedup([1.9, 2.1, 2.0], 0.95)[1][0]
    verdict = judge_gate(gate("speedup", "min", 1.95, 0.95), step(), EVIDENCE)
    assert (verdict["value"], verdict["bound"], verdict["passed"]) == (2.0, low, False)
    assert judge_gate(gate("speedup", "min", 1.95), step(), EVIDENCE)["passed"]
    assert judge_gate(gate("speedup", "min", low, 0.95), step(), EVIDENCE)["passed"]


def test_speed_gate_uses_smallest_batch():
    assert smallest_batch_row(step())["batch_size"] == 1
    assert judge_gate(gate("speedup", "min", 5), step(), EVIDENCE)["value"] == 2.0
    assert smallest_batch_row(step(latency=[])) is None


def test_disturbed_latency_is_not_judged():
    disturbed_step = step()
    disturbed_step["latency"][1].update(stable=False, cause="busy", reason="others worked")
    verdict = judge_gate(gate("speedup", "min", 1.0), disturbed_step, EVIDENCE)
    assert (verdict["passed"], verdict["cause"]) == (None, "busy")
    assert "others worked" in verdict["reason"]


def test_cpu_speedup_gate_is_judged_on_busy_machine():
    disturbed_step = step()
    row = disturbed_step["latency"][1]
    row.update(stable=False, reason="others worked", cpu_speedup=3.0, cpu_speedup_ci95=[2.5, 3.5])
    row["rounds"] = [{"counted": True, "cpu_speedup": ratio} for ratio in (2.9, 3.0, 3.1)]
    assert judge_gate(gate("cpu_speedup", "min", 2.0), disturbed_step, EVIDENCE)["passed"] is True
    open_ = judge_gate(gate("cpu_speedup", "min", 2.9), disturbed_step, EVIDENCE)
    assert (open_["passed"], open_["undecided"]) == (True, True)
    assert judge_gate(gate("cpu_speedup", "min", 3.2), disturbed_step, EVIDENCE)["passed"] is False
    sure = judge_gate(gate("cpu_speedup", "min", 2.8, confidence=0.95), disturbed_step, EVIDENCE)
    assert (sure["passed"], sure["bound"] < 2.8) == (False, True)
    row.update(cpu_speedup=None, cpu_speedup_ci95=None)  # on a GPU
    assert judge_gate(gate("cpu_speedup", "min", 2.0), disturbed_step, EVIDENCE)["passed"] is None
    row.update(speedup=None, speedup_ci95=None)  # the baseline was not timed
    assert judge_gate(gate("cpu_speedup", "min", 2.0), disturbed_step, EVIDENCE)["passed"] is False


def test_missing_score_fails_gate_and_unscorable_step_is_not_judged():
    missing = judge_gate(
        gate("bleu", "min"), step(error={"code": "x", "severity": "error", "message": "it broke"}), EVIDENCE
    )
    assert (missing["passed"], missing["cause"], missing["reason"]) == (False, "x", "it broke")
    unscored = judge_gate(gate("bleu", "min"), step(cause="cannot-run-here", reason="no GPU"), EVIDENCE)
    assert (unscored["passed"], unscored["cause"]) == (None, "cannot-run-here")
    assert unscored["reason"] == "no GPU"
    assert judge_gate(gate(), step(status="skipped"), EVIDENCE) is None
    assert judge_gate(gate("size_bytes", "max", 9), step(), EVIDENCE)["passed"] is False


def test_baseline_drop_is_zero_without_bound():
    verdict = judge_gate(gate(confidence=0.95), step(against_baseline={}), EVIDENCE)
    assert (verdict["value"], verdict["bound"], verdict["passed"]) == (0.0, None, True)


def test_drop_is_not_judged_without_baseline_score():
    verdict = judge_gate(gate(confidence=0.95), step(against_baseline={}), GateStatistics(EVIDENCE.own, {}))
    assert (verdict["value"], verdict["passed"]) == (None, None)
    assert verdict["cause"] == "baseline-not-scored"


NONE = GateStatistics({}, {})


def test_n_needed_grows_linearly_if_outputs_are_unchanged():
    step_report = step(against_baseline={"accuracy": {"difference": 0.0, "ci95": [-1.5, 1.5]}})
    same = GateStatistics(EVIDENCE.own, EVIDENCE.own)
    assert examples_needed(gate(limit=0.75), step_report, same) == pytest.approx(800, abs=1)


def test_n_needed_grows_with_inverse_square_of_margin():
    half = 1.5
    step_report = step(against_baseline={"accuracy": {"difference": 0.0, "ci95": [-half, half]}})
    assert examples_needed(gate(limit=half * 1.001), step_report, NONE) is None
    assert examples_needed(gate(limit=half / 2), step_report, NONE) == pytest.approx(1600, abs=1)
    assert examples_needed(gate(limit=0.0), step_report, NONE) is None
    assert examples_needed(gate("speedup", "min"), step_report, NONE) is None
    assert judge_gate(gate(limit=half / 2), step_report, EVIDENCE)["n_needed"] == pytest.approx(1600, abs=1)


@pytest.mark.parametrize("lower_is_better", [False, True])
def test_n_is_sufficient_if_limit_is_outside_interval(lower_is_better):
    for low, high, enough in ((-33.0, -3.5, True), (-0.5, 33.0, True), (-33.0, 0.5, False)):
        ci95 = [-high, -low] if lower_is_better else [low, high]
        score = {"n": 40, "higher_is_better": not lower_is_better}
        step_report = step(quality={"accuracy": score}, against_baseline={"accuracy": {"ci95": ci95}})
        assert (examples_needed(gate(limit=1.0), step_report, NONE) is None) == enough


@pytest.mark.parametrize(("kind", "limit", "ends", "passed", "undecided"), [
    ("max_degradation", 1.0, (-3.0, 1.0), True, True),  # a drop of 1.0, known to be 3.0 at most
    ("max_degradation", 3.5, (-3.0, 1.0), True, False), ("max_degradation", 0.5, (-3.0, 1.0), False, False),
    ("max_degradation", 1.0, None, True, False),
])  # fmt: skip
def test_drop_interval_crossing_limit_is_undecided(kind, limit, ends, passed, undecided):
    step_report = step()
    step_report["against_baseline"]["accuracy"] = {"difference": -1.0, "ci95": ends, "p_value": 0.3}
    verdict = judge_gate(gate("accuracy", kind, limit), step_report, EVIDENCE)
    assert (verdict["passed"], verdict["undecided"]) == (passed, undecided)


def test_score_interval_crossing_limit_is_undecided():
    low, _ = SCORES[0].ci95
    value = SCORES[0].value
    assert judge_gate(gate("accuracy", "min", low), step(), EVIDENCE)["undecided"] is False
    assert judge_gate(gate("accuracy", "min", (low + value) / 2), step(), EVIDENCE)["undecided"] is True
    assert (
        judge_gate(gate("accuracy", "min", (low + value) / 2, 0.95), step(), EVIDENCE)["undecided"] is False
    )


def test_error_above_limit_never_passes_with_confidence():
    same = OF_OWN.model_copy(update={"metric": "relative_error", "rows": [[5.0]] * 8})
    score = {"value": 500.0, "ci95": None, "higher_is_better": False, "n": 8}
    step_report = step(quality={"relative_error": score}, against_baseline={})
    evidence = GateStatistics({"relative_error": same.dump()}, {"relative_error": same.dump()})
    assert judge_gate(gate("relative_error", "max", 120.0, 0.95), step_report, evidence)["passed"] is False
    assert judge_gate(gate("relative_error", "max", 600.0, 0.95), step_report, evidence)["passed"] is None
