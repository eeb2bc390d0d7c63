import numpy as np
import pytest

from smelt.evaluate.latency.summary import (
    MEDIAN_TOLERANCE,
    ComputeResources,
    MachineLoad,
    MeanTokenCounts,
    RoundPair,
    TimingRound,
    median_call_parts,
    spread_over_lengths,
    summarize_rounds,
)
from smelt.evaluate.report.schema import LatencyReport

pytestmark = pytest.mark.quick

ONE = ComputeResources(threads=1, processors=2)
CALM = MachineLoad(100.0, 99.0, 0.0, 0.1, 0.0, 0.2)


def a_round(times, load=CALM, parts=()):
    return TimingRound(list(times), list(parts), 2 * len(times), load)


def test_summary_of_known_calls():
    pairs = [RoundPair(a_round(times), None) for times in ([1.0, 2.0], [3.0, 4.0], [1.0, 4.0])]
    row = summarize_rounds(pairs, ONE, ONE, MeanTokenCounts(3.0, 2.0))
    assert row["p50_ms"] == 2.5
    assert row["p90_ms"] == pytest.approx(4.0)
    assert row["throughput"] == pytest.approx(1000 * 12 / 15)  # 12 texts in 15 ms
    assert row["cpu_ms"] == pytest.approx(3 * 99 / 6)
    assert row["rounds_ms"] == [1.5, 3.5, 2.5]
    assert (row["speedup"], row["speedup_ci95"], row["parts"]) == (None, None, None)
    assert (row["stable"], row["reason"]) == (True, None)
    LatencyReport.model_validate({"batch_size": 2, "unit": "texts/s", "threads": 1, "texts": 4} | row)


def test_percentiles_are_those_of_the_rounds_that_count():
    busy = MachineLoad(100.0, 50.0, 50.0, 1.5, 0.0, 0.9)
    pairs = [RoundPair(a_round([10.0]), a_round([20.0])) for _ in range(3)]
    pairs.insert(1, RoundPair(a_round([90.0], busy), a_round([20.0])))
    row = summarize_rounds(pairs, ONE, ONE, MeanTokenCounts(3.0, 2.0))
    assert row["p99_ms"] == 10
    assert row["speedup"] == pytest.approx(2)
    assert row["rounds_ms"] == [10, 90, 10, 10]
    assert [r["counted"] for r in row["rounds"]] == [True, False, True, True]
    seen = row["rounds"][1]
    assert (seen["lost_share"], seen["processor_share"], seen["baseline_processor_share"]) == (0.5, 0.5, 0.99)
    assert (seen["other_processors"], seen["pressure"], seen["baseline_ms"]) == (1.5, 0.9, 20)


def test_processor_time_is_compared_in_the_rounds_that_count_and_on_a_cpu_alone():
    half = MachineLoad(100.0, 49.5, 50.5, 1.0, 0.0, 0.5)
    pairs = [RoundPair(a_round([10.0, 10.0], half), a_round([20.0])) for _ in range(3)]
    row = summarize_rounds(pairs, ONE, ONE, MeanTokenCounts(3.0, 2.0))
    assert (row["stable"], row["cause"]) == (False, "busy")
    assert row["cpu_speedup"] == pytest.approx(4)  # 99 ms of one call, 49.5 of two
    assert row["rounds"][0]["cpu_speedup"] == pytest.approx(4)
    assert row["baseline_p50_ms"] == 20
    assert (
        summarize_rounds(pairs, ComputeResources(1, 2, "cuda"), ONE, MeanTokenCounts(3.0, 2.0))["cpu_speedup"]
        is None
    )


def test_parts_add_up_to_the_median_call():
    draw = np.random.default_rng(0)
    for count in (3, 4, 50, 51):
        parts = [[*draw.uniform(1, 20, size=4), 7.0, 0.5] for _ in range(count)]
        calls = np.array([sum(p[:4]) + p[5] for p in parts])
        p50 = float(np.median(calls))
        found = median_call_parts(calls, parts, p50)
        first, last = found["time_to_first_token_ms"], found["detokenizing_ms"]
        whole = first + found["time_per_output_token_ms"] * found["further_tokens"] + last
        assert whole == pytest.approx(p50, rel=MEDIAN_TOLERANCE)
        assert first > found["tokenizing_ms"] + found["encoding_ms"]


def test_parts_of_a_classifier_add_up_to_the_median_call():
    parts = [[1.0, 5.0, 0.5], [1.0, 9.0, 0.5], [2.0, 5.0, 0.5]]
    found = median_call_parts(np.array([6.5, 10.5, 7.5]), parts, 7.5)
    assert found == {"tokenizing_ms": 2.0, "model_ms": 5.0, "rest_ms": 0.5}


def test_parts_of_a_graph_with_the_loop_add_up_to_the_median_call():
    """Its first token was timed by itself; the further ones have the rest of the graph's part."""
    parts = [[0.5, 6.0, 4.0, 1.0, 2.0]] * 3
    found = median_call_parts(np.array([7.5, 7.5, 7.5]), parts, 7.5)
    assert found["encoding_ms"] is None
    assert (found["tokenizing_ms"], found["time_to_first_token_ms"], found["time_per_output_token_ms"]) == (
        0.5,
        2.5,
        1.0,
    )
    further = found["time_per_output_token_ms"] * found["further_tokens"]
    assert found["time_to_first_token_ms"] + further + found["detokenizing_ms"] == pytest.approx(7.5)


def test_parts_of_long_prompts_without_the_graphs_loop_are_not_mixed_with_the_others():
    in_graph, by_steps = [0.5, 6.0, 4.0, 1.0, 2.0], [1.0, 40.0, 1.0, 30.0, 3.0, 1.0]
    calls = np.array([7.5, 7.6, 73.0, 73.5, 7.4])
    found = median_call_parts(calls, [in_graph, in_graph, by_steps, by_steps, in_graph], 7.6)
    assert (found["encoding_ms"], found["time_to_first_token_ms"]) == (None, 2.5)
    both = median_call_parts(np.array([7.5, 7.6]), [in_graph, by_steps], 7.5)  # as near as each other
    assert (both["encoding_ms"], both["further_tokens"]) == (None, 4.0)


def test_parts_of_two_far_calls_are_those_about_the_median():
    parts = [[1.0, 1.0, 1.0, 0.0, 0.0, 1.0], [1.0, 7.0, 1.0, 0.0, 0.0, 1.0]]
    found = median_call_parts(np.array([4.0, 10.0]), parts, 7.0)
    assert found["encoding_ms"] == 4
    assert found["time_per_output_token_ms"] is None


def test_spread_takes_the_middles_of_equal_shares_of_the_lengths():
    texts = ["x" * n for n in (9, 1, 5, 7, 3, 2, 8, 4, 6, 10)]
    assert [len(texts[i]) for i in spread_over_lengths(texts, 5)] == [2, 4, 6, 8, 10]
    assert len(spread_over_lengths(["a", "b"], 6)) == 6
