from smelt.evaluate.frontier import axes, frontier


def step(name, quality=None, latency=None, higher=True, batch=1):
    return {
        "name": name,
        "quality": {"bleu": {"value": quality, "higher_is_better": higher}} if quality is not None else {},
        "latency": [{"batch_size": batch, "p50_ms": latency}] if latency is not None else [],
    }


def test_dominated_steps_are_out():
    steps = [step("a", 40, 10), step("b", 39, 12), step("c", 38, 4), step("d", 37, 3), step("e", 37.5, 4)]
    assert frontier(steps) == ["a", "c", "d"]


def test_equal_steps_both_stay_and_tie_in_one_axis_loses():
    assert frontier([step("a", 40, 10), step("b", 40, 10), step("c", 40, 11)]) == ["a", "b"]


def test_steps_without_quality_or_latency_are_out():
    assert frontier([step("a", 40, 10), step("b", 50), step("c", None, 1), {"name": "d"}]) == ["a"]


def test_lower_is_better_for_perplexity():
    assert frontier([step("a", 5.0, 10, higher=False), step("b", 6.0, 12, higher=False)]) == ["a"]


def test_smallest_batch_size_counts():
    steps = [step("a", 40, 10), step("b", 39, 2, batch=8)]
    steps[0]["latency"].append({"batch_size": 8, "p50_ms": 1})
    assert axes(steps) == ("bleu", 1)
    assert frontier(steps) == ["a"]


def test_nothing_measured_gives_an_empty_front():
    assert frontier([]) == []
    assert axes([]) == (None, None)
