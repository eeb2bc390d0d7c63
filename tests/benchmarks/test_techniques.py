"""techniques.py: its intervals against scipy's and by hand, and that a run goes on from what it kept."""

import math

import benchmarks_path  # noqa: F401 -- before what lies in benchmarks
import numpy as np
import paired_intervals
import pytest
import techniques
from scipy import stats
from techniques_table import Group, as_values, draw_table

from smelt.evaluate.quality import score_texts
from smelt.evaluate.significance import compare_steps, metric_value

SAID = ["a man walks on the street .", "two dogs play in the snow .", "the girl is reading a book ."]
BETTER = ["a man walks down the street .", "two dogs play in the snow .", "a girl is reading a book ."]
WANTED = [["a man walks down the street ."], ["two dogs run in the snow ."], ["a girl is reading a book ."]]


def bleu(outputs):
    return score_texts(["bleu"], outputs, [*WANTED, *WANTED, *WANTED][: len(outputs)])["bleu"].statistics


def ends(found):
    return pytest.approx((found.low, found.high))


def test_interval_over_seeds_is_that_of_students_one_sample_test():
    values = [0.31, 0.25, 0.28]
    wanted = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (wanted.low, wanted.high) == ends(paired_intervals.interval_over_seeds(values))


@pytest.mark.parametrize("values", [[0.3], [0.3, 0.3, 0.3]])
def test_what_no_seed_changes_has_no_interval_over_seeds(values):
    assert paired_intervals.interval_over_seeds(values) == paired_intervals.Interval(0.3, None, None)


def test_seeds_are_compared_in_pairs_and_a_model_without_seed_with_each():
    wanted = stats.ttest_rel([1.0, 1.2, 1.3], [0.9, 1.15, 1.1]).confidence_interval(0.95)
    assert (wanted.low, wanted.high) == ends(
        paired_intervals.seed_difference_interval([1.0, 1.2, 1.3], [0.9, 1.15, 1.1])
    )
    assert paired_intervals.seed_difference_interval(
        [1.0, 1.2, 1.3], [1.0]
    ) == paired_intervals.interval_over_seeds([0, 1.2 - 1.0, 1.3 - 1.0])


def test_interval_over_rows_of_equal_length_is_that_of_the_paired_test():
    draw_from = np.random.default_rng(0)
    one, other = draw_from.normal(8, 1, 50), draw_from.normal(7, 1, 50)
    found = paired_intervals.loss_difference_interval([one], [other], [4] * 50)
    wanted = stats.ttest_rel(one / 4, other / 4).confidence_interval(0.95)
    assert (wanted.low, wanted.high) == ends(found)


def test_interval_over_rows_of_unequal_length_holds_the_truth_as_often_as_it_says():
    """A loss that is 0.1 nats a token higher, over rows of 5 to 30 tokens: 95 of 100 intervals hold it."""
    held, source = 0, np.random.default_rng(1)
    for _ in range(400):
        tokens = source.integers(5, 30, 60)
        base = source.gamma(2, 1, 60) * tokens
        more = base + 0.1 * tokens + source.normal(0, 0.2, 60) * tokens
        found = paired_intervals.loss_difference_interval([more], [base], tokens)
        assert found.value == pytest.approx((more.sum() - base.sum()) / tokens.sum())
        held += found.low <= 0.1 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_scores_over_rows_are_those_of_the_report():
    """One text a side: the difference and interval of smelt.evaluate.significance."""
    better, control = bleu(BETTER * 3), bleu(SAID * 3)
    found, wanted = (
        paired_intervals.score_difference_interval([better], [control]),
        compare_steps(better, control),
    )
    assert found.value == wanted["difference"]
    assert [found.low, found.high] == wanted["ci95"]


def test_texts_of_several_seeds_are_one_corpus():
    both = score_texts(["bleu"], [*SAID, *BETTER], [*WANTED, *WANTED])["bleu"].value
    assert metric_value(paired_intervals.merge_seeds([bleu(SAID), bleu(BETTER)])) == pytest.approx(both)
    assert len(paired_intervals.merge_seeds([bleu(SAID), bleu(BETTER)]).rows) == len(SAID)


def run(nats, outputs=SAID, more=SAID, **known):
    scores = {"1": bleu(outputs).dump(), "4": bleu(more).dump()}
    return {
        "nats": nats,
        "kl": [0.5 * value for value in nats],
        "tokens": [4, 6, 5],
        "parameters": 7,
        "seconds": 1.0,
        "bleu": scores,
        "details": [],
    } | known


def test_table_says_how_far_an_arm_is_from_its_control_and_how_much_more_greedy_gains():
    arms = {"model": [run([4, 6, 5])], "new": [run([8, 9, 7], BETTER), run([8, 9, 8.5], BETTER)], "odd": []}
    values = as_values(Group("g", arms, {}))
    assert list(values) == ["model", "new"]
    apart = values["new"]["against"]
    assert apart["control"] == "model"
    assert apart["loss_over_seeds"]["value"] == pytest.approx((24 + 25.5) / 2 / 15 - 1)
    gain = metric_value(bleu(BETTER)) - metric_value(bleu(SAID))
    assert apart["bleu_1_over_seeds"]["value"] == pytest.approx(gain)
    assert apart["bleu_1_less_4_over_seeds"]["value"] == pytest.approx(gain)
    text = draw_table(Group("g", arms, {}), values)
    assert "| new | 7 | 1.600, 1.700 | 0.8000, 0.8500 | model | +0.650 [" in text
    assert f"| new | 1 less 4 |  | model | {gain:+.2f} | {gain:+.2f} [" in text


def test_arms_are_compared_in_the_seeds_that_both_have():
    made = [{"stage": "prune"}]
    control = [run([9, 9, 9], seed=1, details=made), run([3, 6, 6], seed=2, details=made)]
    arms = {"control": control, "new": [run([4, 6, 5], seed=seed, details=made) for seed in (0, 2)]}
    apart = as_values(Group("g", arms, {}))["new"]["against"]
    assert apart["seeds"] == 1
    assert apart["loss_over_seeds"]["value"] == pytest.approx(0)
    arms = {"control": control[:1], "new": [run([4, 6, 5], seed=0, details=made)]}
    assert "against" not in as_values(Group("g", arms, {}))["new"]


def test_part_of_the_updates_is_taken_in_every_stage_and_phase():
    stages = [
        ("distill", {"max_steps": 240, "phases": [{"max_steps": 120, "losses": {"hidden_states": 1}}]}),
        ("share-weights", {}),
    ]
    assert techniques.scale_updates(stages, 0.1) == [
        ["distill", {"max_steps": 24, "phases": [{"max_steps": 12, "losses": {"hidden_states": 1}}]}],
        ["share-weights", {}],
    ]


class Counting:
    """A bench whose arms are numbers."""

    def __init__(self, fails=()):
        self.ran, self.fails = [], fails

    def key(self, stages, seed, train, beams, as_run):
        return f"{stages}{seed}{train}{beams}"

    def measure(self, stages, seed, train, beams, as_run):
        self.ran.append((stages[0][0], seed) if stages else ("model", seed))
        if seed in self.fails:
            raise RuntimeError("out of memory")
        return run([4, 6, math.pi])


def arms(monkeypatch):
    class File:
        ARMS = {"model": [], "one": [("a", {"max_steps": 10})], "two": [("b", {})]}  # noqa: RUF012
        SEEDS = 2

    monkeypatch.setattr(techniques, "groups", lambda: {"g": File})
    return techniques.jobs(["g"], (), None, 1.0)


def test_run_that_was_stopped_goes_on(tmp_path, monkeypatch):
    path, found = tmp_path / "results.jsonl", arms(monkeypatch)
    first = Counting()
    techniques.run_jobs(found[:3], techniques.Results(path), first, known=False)
    path.write_text(path.read_text()[:-40])  # killed while it wrote the third
    second = Counting()
    (group,) = techniques.run_jobs(found, techniques.Results(path), second, known=False)
    assert first.ran == [("model", 0), ("a", 0), ("b", 0)]
    assert second.ran == [("b", 0), ("a", 1), ("b", 1)]
    assert {arm: [each["seed"] for each in runs] for arm, runs in group.arms.items()} == {
        "model": [0], "one": [0, 1], "two": [0, 1],
    }  # fmt: skip
    third = Counting()
    assert techniques.run_jobs(found, techniques.Results(path), third, known=False) == [group]
    assert third.ran == []


def test_arm_that_fails_costs_no_other_and_is_tried_again(tmp_path, monkeypatch, capsys):
    path, found = tmp_path / "results.jsonl", arms(monkeypatch)
    (group,) = techniques.run_jobs(found, techniques.Results(path), Counting(fails=[1]), known=False)
    assert [len(runs) for runs in group.arms.values()] == [1, 1, 1]
    assert "g: one, seed 1 failed: out of memory" in capsys.readouterr().err
    again = Counting()
    techniques.run_jobs(found, techniques.Results(path), again, known=False)
    assert again.ran == [("a", 1), ("b", 1)]


def test_what_is_not_known_is_left_out_where_nothing_is_to_run(monkeypatch):
    bench = Counting()
    (group,) = techniques.run_jobs(arms(monkeypatch), techniques.Results(None), bench, known=True)
    assert bench.ran == []
    assert not any(group.arms.values())


def test_every_arm_is_one_that_its_stages_take_and_every_control_is_there():
    from smelt.pipeline.recipe.stages import load_stage

    for name, file in techniques.groups().items():
        assert set(getattr(file, "AGAINST", {}).values()) | set(getattr(file, "AGAINST", {})) <= set(
            file.ARMS
        ), name
        assert set(getattr(file, "TEXTS", {})) <= set(file.ARMS), name
        for stages in file.ARMS.values():
            for word, settings in techniques.scale_updates(stages, 0.5):
                load_stage(word).settings_type.model_validate(settings)
