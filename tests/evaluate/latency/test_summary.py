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
from smelt.evaluate.report.step_schema import LatencyReport

pytestmark = pytest.mark.quick

ONE = ComputeResources(threads=1, processors=2)
CALM = MachineLoad(100.0, 99.0, 0.0, 0.1, 0.0, 0.2)


def a_round(times, load=CALM, parts=()):
    return TimingRound(list(times), list(parts), 2 * len(times), load)


def test_summary_of_constructed_calls():
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


def test_percentiles_use_counted_rounds_only():
    busy = MachineLoad(100.0, 50.0, 50.0, 1.5, 0.0, 0.9)
    pairs = [RoundPair(a_round([10.0]), a_round([20.0])) for _ in range(3)]
    pairs.insert(1, RoundPair(a_round([90.0], busy), a_round([20.0])))
    row = summarize_rounds(pairs, ONE, ONE, MeanTokenCounts(3.0, 2.0))
    assert row["p99_ms"] == 10
    assert row["speedup"] == pytest.approx(2)
    assert row["rounds_ms"] == [10, 90, 10, 10]
    assert [r["counted"] for r in row["rounds"]] == [True, False, True, True]
    round_details = row["rounds"][1]
    assert (
        round_details["lost_share"],
        round_details["processor_share"],
        round_details["baseline_processor_share"],
    ) == (0.5, 0.5, 0.99)
    assert (round_details["other_processors"], round_details["pressure"], round_details["baseline_ms"]) == (
        1.5,
        0.9,
        20,
    )


def test_cpu_time_is_compared_in_counted_rounds_on_cpu_only():
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


def test_parts_sum_to_median_call():
    draw = np.random.default_rng(0)
    for count in (3, 4, 50, 51):
        parts = [[*draw.uniform(1, 20, size=4), 7.0, 0.5] for _ in range(count)]
        calls = np.array([sum(p[:4]) + p[5] for p in parts])
        p50 = float(np.median(calls))
        median_parts = median_call_parts(calls, parts, p50)
        first, last = median_parts["time_to_first_token_ms"], median_parts["detokenizing_ms"]
        parts_sum = first + median_parts["time_per_output_token_ms"] * median_parts["further_tokens"] + last
        assert parts_sum == pytest.approx(p50, rel=MEDIAN_TOLERANCE)
        assert first > median_parts["tokenizing_ms"] + median_parts["encoding_ms"]


def test_classifier_parts_sum_to_median_call():
    parts = [[1.0, 5.0, 0.5], [1.0, 9.0, 0.5], [2.0, 5.0, 0.5]]
    median_parts = median_call_parts(np.array([6.5, 10.5, 7.5]), parts, 7.5)
    assert median_parts == {"tokenizing_ms": 2.0, "model_ms": 5.0, "rest_ms": 0.5}


def test_generation_graph_parts_sum_to_median_call():
    """Its first token was timed by itself; the further ones have the rest of the graph's part."""
    parts = [[0.5, 6.0, 4.0, 1.0, 2.0]] * 3
    median_parts = median_call_parts(np.array([7.5, 7.5, 7.5]), parts, 7.5)
    assert median_parts["encoding_ms"] is None
    assert (
        median_parts["tokenizing_ms"],
        median_parts["time_to_first_token_ms"],
        median_parts["time_per_output_token_ms"],
    ) == (
        0.5,
        2.5,
        1.0,
    )
    later_ms = median_parts["time_per_output_token_ms"] * median_parts["further_tokens"]
    assert median_parts["time_to_first_token_ms"] + later_ms + median_parts[
        "detokenizing_ms"
    ] == pytest.approx(7.5)


def test_calls_with_and_without_generation_graph_are_not_averaged():
    in_graph, by_steps = [0.5, 6.0, 4.0, 1.0, 2.0], [1.0, 40.0, 1.0, 30.0, 3.0, 1.0]
    calls = np.array([7.5, 7.6, 73.0, 73.5, 7.4])
    median_parts = median_call_parts(calls, [in_graph, in_graph, by_steps, by_steps, in_graph], 7.6)
    assert (median_parts["encoding_ms"], median_parts["time_to_first_token_ms"]) == (None, 2.5)
    tied_parts = median_call_parts(np.array([7.5, 7.6]), [in_graph, by_steps], 7.5)  # as near as each other
    assert (tied_parts["encoding_ms"], tied_parts["further_tokens"]) == (None, 4.0)


def test_parts_of_two_calls_average_around_median():
    parts = [[1.0, 1.0, 1.0, 0.0, 0.0, 1.0], [1.0, 7.0, 1.0, 0.0, 0.0, 1.0]]
    median_parts = median_call_parts(np.array([4.0, 10.0]), parts, 7.0)
    assert median_parts["encoding_ms"] == 4
    assert median_parts["time_per_output_token_ms"] is None


def test_spread_selects_midpoints_of_length_quantiles():
    texts = ["x" * n for n in (9, 1, 5, 7, 3, 2, 8, 4, 6, 10)]
    assert [len(texts[i]) for i in spread_over_lengths(texts, 5)] == [2, 4, 6, 8, 10]
    assert len(spread_over_lengths(["a", "b"], 6)) == 6
