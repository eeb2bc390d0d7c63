import pytest

from smelt.evaluate.report.step_schema import is_step_at_chance
from smelt.evaluate.report.verdict import front_axes, pareto_front

pytestmark = pytest.mark.quick


def step(name, quality=None, speed=None, higher=True, batch=1, **more):
    row = {"batch_size": batch, "p50_ms": 1.0, "speedup": speed, "stable": more.pop("stable", True)}
    return {
        "name": name,
        "quality": {"bleu": {"value": quality, "higher_is_better": higher}} if quality is not None else {},
        "latency": [row] if speed is not None else [],
        **more,
    }


def test_dominated_steps_are_excluded():
    steps = [step("a", 40, 1), step("b", 39, 0.9), step("c", 38, 4), step("d", 37, 5), step("e", 37.5, 4)]
    assert pareto_front(steps) == ["a", "c", "d"]


def test_equal_steps_are_kept_and_weakly_dominated_are_excluded():
    assert pareto_front([step("a", 40, 2), step("b", 40, 2), step("c", 40, 1.9)]) == ["a", "b"]


def test_steps_without_quality_or_speed_are_excluded():
    steps = [step("a", 40, 1), step("b", 50), step("c", None, 9), {"name": "d"}]
    untimed_baseline = step("e", 60, 1)
    untimed_baseline["latency"][0]["speedup"] = None
    assert pareto_front([*steps, untimed_baseline]) == ["a"]


def test_lower_is_better_for_perplexity():
    assert pareto_front([step("a", 5.0, 2, higher=False), step("b", 6.0, 1, higher=False)]) == ["a"]


def test_front_uses_smallest_batch_size():
    steps = [step("a", 40, 1), step("b", 39, 5, batch=8)]
    steps[0]["latency"].append({"batch_size": 8, "p50_ms": 1, "speedup": 1})
    assert front_axes(steps) == ("bleu", 1)
    assert pareto_front(steps) == ["a"]


def test_front_uses_speedup_not_latency():
    # timed at another moment than its baseline: more milliseconds, but the greater speed-up compared with it
    steps = [step("a", 38, 3), step("b", 38, 4)]
    steps[1]["latency"][0]["p50_ms"] = 2.0
    assert pareto_front(steps) == ["b"]


def test_non_deployable_step_dominates_no_other():
    steps = [step("model", 40, 1), step("int8", 41, 0.5, deployable=False), step("onnx", 40.5, 3)]
    assert pareto_front(steps) == ["onnx"]
    steps[1]["quality"]["bleu"]["value"], steps[1]["latency"][0]["speedup"] = 50, 9
    assert pareto_front(steps) == ["onnx"]


def test_disturbed_steps_are_excluded_except_baseline():
    steps = [step("model", 40, 1, stable=False), step("fast", 39, 138, stable=False), step("onnx", 39, 2)]
    assert pareto_front(steps, "model") == ["model", "onnx"]


@pytest.mark.parametrize("stable", [True, False])
def test_baseline_alone_after_disturbance_is_no_front(stable):
    base = step("onnx", 40, 1, stable=stable)
    fast, slow = step("int4", 39, 3, stable=False), step("int8", 39, 0.9, stable=False)
    assert pareto_front([base, fast, slow], "onnx") == []
    assert pareto_front([base, {"name": "skipped"}], "onnx") == ["onnx"]  # nothing else was there to be timed
    assert pareto_front([base, fast, step("int8", 39, 0.9)], "onnx") == ["onnx"]  # int8 is beaten


def test_no_measurements_give_empty_front():
    assert pareto_front([]) == []
    assert front_axes([]) == (None, None)


def scored(value, chance, ci95=None, better=True):
    return {"quality": {"m": {"value": value, "ci95": ci95, "chance": chance, "higher_is_better": better}}}


@pytest.mark.parametrize(("step", "is_at_chance"), [
    (scored(52.67, 50.3, [47.0, 58.2]), True),  # a random classifier of two classes
    (scored(69.3, 50.3, [63.9, 74.3]), False), (scored(0.0, 0.0, [0.0, 0.0]), True),
    (scored(3.0, 0.0), False),
    # a uniform language model has 300
    (scored(320.0, 300.0, [310.0, 330.0], better=False), True),
    (scored(80.0, 300.0, [75.0, 86.0], better=False), False), (scored(1.0, None), False),
    ({"quality": {}}, False),
])  # fmt: skip
def test_steps_at_chance_are_excluded_from_front(step, is_at_chance):
    assert is_step_at_chance(step) is is_at_chance
