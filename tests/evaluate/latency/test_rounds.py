"""Which rounds count and what may be claimed, on rounds that were made up or recorded."""

import math
import re

import numpy as np
import pytest

from smelt.evaluate.latency.summary import (
    ComputeResources,
    MachineLoad,
    RoundPair,
    TimingRound,
    judge_rounds,
    mean_speedup,
)

pytestmark = pytest.mark.quick

ONE = ComputeResources(threads=1, processors=2)
TWO = ComputeResources(threads=2, processors=2)


def load(used=0.99, waited=0.0, others=0.0, stolen=0.0, wall=200.0, gpu_others=None):
    return MachineLoad(wall, used * wall, waited * wall, others, stolen, None, gpu_others)


def a_round(ms, **loads):
    return TimingRound([ms, ms * 1.01, ms * 0.99], [], 3, load(**loads))


def pairs(ratios, step_load=None, base=None):
    return [RoundPair(a_round(10.0, **(step_load or {})), a_round(10.0 * r, **(base or {}))) for r in ratios]


def test_single_thread_without_cpu_is_disturbed():
    assert a_round(10, used=0.95).lost_share(ONE) == pytest.approx(0.05)
    assert a_round(10, used=0.7).lost_share(ONE) == pytest.approx(0.3)
    # the other processor is busy, and that is none of its business
    assert a_round(10, used=0.99, others=1.0).lost_share(ONE) == pytest.approx(0.01)
    # time that the hypervisor takes may be counted as used
    assert a_round(10, used=1.0, stolen=0.6).lost_share(ONE) == pytest.approx(0.3)


def test_waiting_threads_or_too_few_cores_are_disturbed():
    # between two threads there are always moments in which one waits for the other
    assert a_round(10, used=1.3).lost_share(TWO) == 0
    assert a_round(10, used=1.3, waited=0.2).lost_share(TWO) == pytest.approx(0.2)
    # threads that spin are never seen waiting, but others want half a processor that is not there
    assert a_round(10, used=1.9, others=0.5).lost_share(TWO) == pytest.approx(0.25)
    assert a_round(10, used=1.9, others=0.5).lost_share(ComputeResources(2, 4)) == 0
    # more threads than processors is what was asked for, not what others do
    assert a_round(10, used=1.9).lost_share(ComputeResources(4, 2)) == 0


def test_gpu_round_counts_only_required_cores():
    resources = ComputeResources(threads=1, processors=2, device="cuda")
    assert a_round(10, used=0.1).lost_share(resources) == 0
    assert a_round(10, used=0.1, others=1.4).lost_share(resources) == pytest.approx(0.4)


def test_other_processes_on_the_gpu_disturb_rounds_there():
    resources = ComputeResources(threads=1, processors=2, device="cuda")
    assert a_round(10, gpu_others=0.3).lost_share(resources) == pytest.approx(0.3)
    assert a_round(10, gpu_others=0.3).lost_share(ONE) < 0.1  # on the CPU they do not matter
    verdict = judge_rounds(pairs([2.0] * 5, step_load={"gpu_others": 0.4}), resources, resources)
    assert verdict.cause == "busy"
    assert "40 %" in verdict.reason


def test_disturbed_rounds_are_excluded_and_repeated():
    calm, busy = pairs([2.0, 2.0, 2.0]), pairs([9.0, 9.5], base={"used": 0.5})
    verdict = judge_rounds([*busy, *calm], ONE, ONE, 5)
    assert verdict.counted_rounds == (2, 3, 4)
    assert verdict.stable
    assert not verdict.is_sufficient  # five were asked for
    assert judge_rounds([*busy, *calm], ONE, ONE, 3).is_sufficient


def test_disturbed_baseline_gives_unstable_result():
    verdict = judge_rounds(pairs([138, 135, 144, 137, 140], base={"used": 1.2, "waited": 0.8}), TWO, TWO, 5)
    assert not verdict.stable
    assert verdict.cause == "busy"
    assert re.findall(r"\d+", verdict.reason) == ["5", "5", "80"]  # rounds, of rounds, per cent of the time
    assert verdict.counted_rounds == (0, 1, 2, 3, 4)  # all are shown where too few were calm


def test_disagreeing_rounds_give_unstable_result():
    verdict = judge_rounds(pairs([1.0, 2.0, 3.0, 1.5, 2.5]), ONE, ONE, 5)
    assert (verdict.stable, verdict.is_sufficient) == (False, False)
    assert all(ratio in verdict.reason for ratio in ("1.00×", "3.00×"))


def test_baseline_without_comparison_is_judged_by_its_load():
    baseline_pairs = [RoundPair(a_round(10), None)] * 3
    assert judge_rounds(baseline_pairs, ONE, ONE).stable
    assert not judge_rounds([RoundPair(a_round(10, used=0.6), None)] * 3, ONE, ONE).stable


def test_speedup_interval_is_student_t_over_logarithms():
    from scipy import stats

    ratios = [2.0, 2.2, 2.4, 2.5, 5.0]
    value, (low, high) = mean_speedup(ratios)
    assert value == pytest.approx(stats.gmean(ratios))
    reference = stats.ttest_1samp(np.log(ratios), 0).confidence_interval(0.95)
    assert (low, high) == pytest.approx((math.exp(reference.low), math.exp(reference.high)))
    wider = mean_speedup(ratios, 0.99)[1]
    assert wider[0] < low < high < wider[1]
