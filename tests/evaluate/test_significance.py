import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm, permutation_test, spearmanr, t, ttest_rel
from sklearn.metrics import f1_score, matthews_corrcoef

from smelt.core.errors import InputError
from smelt.evaluate.metrics.registry import METRICS, TEXT_METRICS
from smelt.evaluate.quality import score_labels, score_texts, score_windows
from smelt.evaluate.significance import (
    Statistics,
    compare_steps,
    difference_interval,
    holm,
    metric_interval,
    metric_value,
    min_examples,
    student_interval,
    tango_interval,
    wilson_interval,
)
from tests.support.expected_errors import raises_code
from tests.support.expected_intervals import student_interval as expected_interval

WORDS = [
    "a",
    "man",
    "and",
    "the",
    "dog",
    "run",
    "over",
    "green",
    "grass",
    "near",
    "white",
    "fence",
    "by",
    "river",
    "with",
    "hat",
]
rng = np.random.default_rng(3)
REFERENCES = [" ".join(rng.choice(WORDS, size=rng.integers(5, 12))) for _ in range(80)]


def predictions(error, seed):
    noise = np.random.default_rng(seed)
    return [
        " ".join(str(noise.choice(WORDS)) if noise.random() < error else w for w in text.split())
        for text in REFERENCES
    ]


GOOD, POOR = predictions(0.15, 1), predictions(0.45, 2)
# a proportion is tested as accuracy is
GRADED_METRICS = [m for m in TEXT_METRICS if METRICS[m].kind != "proportion" and not METRICS[m].reads_file]


def statistics(metric, texts):
    return score_texts([metric], texts, [[text] for text in REFERENCES])[metric].statistics


@pytest.mark.parametrize("metric", GRADED_METRICS)
def test_better_step_has_positive_difference_and_small_p(metric):
    better, worse = statistics(metric, GOOD), statistics(metric, POOR)
    result = compare_steps(better, worse)
    sign = 1 if METRICS[metric].higher_is_better else -1
    low, high = sorted(sign * end for end in result["ci95"])
    assert sign * result["difference"] > 5
    assert 0 < low <= sign * result["difference"] <= high
    assert 0 < result["p_value"] < 2 / 1001  # more comparisons may be made than 1000 resamples could bear
    back = compare_steps(worse, better)
    assert back["difference"] == pytest.approx(-result["difference"])
    assert back["ci95"] == pytest.approx([-result["ci95"][1], -result["ci95"][0]])


def test_step_against_itself_shows_no_difference():
    for same in (statistics("bleu", GOOD), score_labels(["accuracy"], [1, 0], [1, 1])["accuracy"].statistics):
        found = compare_steps(same, same)
        assert (found["difference"], found["p_value"]) == (0.0, 1.0)


@pytest.mark.parametrize("metric", [m for m in GRADED_METRICS if METRICS[m].limits == (0, 100)])
def test_an_interval_of_what_did_not_change_knows_n(metric):
    """Wilson's upper end of 0 changed examples of n, z^2 / (n + z^2), of what they can lose, and gain."""
    for n in (8, 40, 400):
        same = statistics(metric, GOOD)
        same = same.model_copy(update={"rows": (same.rows * 5)[:n]})
        low, high = compare_steps(same, same)["ci95"]
        z2 = NormalDist().inv_cdf(0.975) ** 2
        share, value = z2 / (n + z2), metric_value(same)
        assert (low, high) == (pytest.approx(-value * share), pytest.approx((100 - value) * share))


def test_an_interval_of_few_changed_examples_is_wide_and_of_many_is_not():
    base = statistics("rouge1", GOOD)
    base = base.model_copy(update={"rows": [[0.5]] * 100})

    def changed(k):
        rows = [[0.4]] * k + [[0.5]] * (100 - k)
        return difference_interval(base.model_copy(update={"rows": rows}), base)

    # one in 100 costs 0.1 points, with a standard error of 0.1 and 5 degrees of freedom; Wilson's upper end
    # of 0 of 100 is 3.7 %, and each of these has 50 points to lose
    assert changed(1)[0] == pytest.approx(-0.1 - 0.1 * t.ppf(0.975, 5) - 50 * 0.037, abs=0.03)
    assert changed(1)[0] < changed(6)[0] < -0.6
    assert wilson_interval(0, 100)[1] == pytest.approx(3.70, abs=0.01)


def test_an_interval_that_is_a_point_is_widened_where_all_differ_alike():
    rows = statistics("rouge1", GOOD).model_copy(update={"rows": [[0.5]] * 8})
    worse = rows.model_copy(update={"rows": [[0.4]] * 8})
    low, high = difference_interval(worse, rows)
    assert low < -10 < high
    nats = rows.model_copy(update={"metric": "bits_per_byte", "rows": [[400.0, 100, 500]] * 8})
    more = nats.model_copy(update={"rows": [[410.0, 100, 500]] * 8})
    assert difference_interval(more, nats) is None


@pytest.mark.parametrize("metric", ["bleu", "chrf", "rouge1"])
def test_an_interval_of_equal_values_knows_n(metric):
    perfect = score_texts([metric], ["a man and a dog run"] * 8, [["a man and a dog run"]] * 8)[metric]
    assert perfect.value == pytest.approx(100)
    low, high = perfect.ci95
    assert (low, high) == (pytest.approx(100 - 32.4, abs=0.1), pytest.approx(100))


def test_perplexities_that_are_equal_have_no_interval():
    rows = [[400.0, 100, 500]] * 8
    same = statistics("bleu", GOOD).model_copy(update={"metric": "perplexity", "rows": rows})
    assert student_interval(same) is None
    assert difference_interval(same, same) is None


@pytest.mark.parametrize("metric", GRADED_METRICS)
def test_few_examples_are_significant_only_as_far_as_their_signs_can_be(metric):
    better, worse = statistics(metric, GOOD), statistics(metric, POOR)
    for n in range(1, 9):
        one, two = (s.model_copy(update={"rows": s.rows[:n]}) for s in (better, worse))
        assert compare_steps(one, two)["p_value"] >= 2 / 2**n
    five = compare_steps(*(s.model_copy(update={"rows": [s.rows[0]] * 5}) for s in (better, worse)))
    assert five["p_value"] == 2 / 2**5  # all are the same, and yet no 2 / 1001


def test_examples_that_do_not_differ_have_no_sign():
    good = statistics("chrf", GOOD)
    rows = [*statistics("chrf", POOR).rows[:4], *good.rows[4:]]
    found = compare_steps(good.model_copy(update={"rows": rows}), good)
    assert found["difference"] < 0
    assert found["p_value"] >= 2 / 2**4


def test_few_examples_have_no_interval():
    good, poor = (score_texts(["bleu"], [t], [[REFERENCES[0]]])["bleu"] for t in (GOOD[0], POOR[0]))
    assert (good.ci95, metric_interval(good.statistics)) == (None, None)
    assert compare_steps(good.statistics, poor.statistics) == {
        "difference": good.value - poor.value, "ci95": None, "p_value": 1.0, "n": 1
    }  # fmt: skip
    for confidence, least in ((0.5, 2), (0.9, 5), (0.95, 6), (0.99, 8), (0.999, 11)):
        assert min_examples("bleu", confidence) == least
        assert 2 / 2**least <= 1 - confidence < 2 / 2 ** (least - 1)
        for n in (least - 1, least):
            own, other = (
                s.model_copy(update={"rows": s.rows[:n]})
                for s in (statistics("bleu", GOOD), statistics("bleu", POOR))
            )
            assert (metric_interval(own, confidence) is None) == (n < least)
            assert (difference_interval(own, other, confidence) is None) == (n < least)
    hits = score_labels(["accuracy"], [1], [1])["accuracy"]  # Wilson's and Tango's hold for one
    assert hits.ci95 == metric_interval(hits.statistics)
    assert compare_steps(hits.statistics, hits.statistics)["ci95"] is not None


def test_other_windows_of_a_text_are_as_few_as_the_fewer_of_both():
    few, many = (
        score_windows(["perplexity"], [9.0] * n, [4] * n, [12] * n, "window:8", ["x"])[
            "perplexity"
        ].statistics
        for n in (5, 9)
    )
    for one, two in ((few, many), (many, few)):
        found = compare_steps(one, two)
        assert found["ci95"] is None
        assert found["p_value"] >= 2 / 2**5


def test_chance_is_not_called_a_difference():
    result = compare_steps(statistics("bleu", predictions(0.3, 5)), statistics("bleu", predictions(0.3, 6)))
    assert result["p_value"] > 0.05
    assert result["ci95"][0] < 0 < result["ci95"][1]


def test_difference_and_p_agree_with_sacrebleu_approximate_randomization():
    near = predictions(0.17, 7)
    ours = compare_steps(statistics("bleu", near), statistics("bleu", GOOD))
    test = PairedTest(
        [("good", GOOD), ("near", near)],
        {"BLEU": BLEU(references=[REFERENCES])},
        None,
        test_type="ar",
        n_samples=10_000,
    )
    _, scores = test()
    first, second = scores["BLEU"]
    assert ours["difference"] == pytest.approx(second.score - first.score, abs=1e-6)
    assert 0.01 < second.p_value < 0.5
    assert ours["p_value"] == pytest.approx(second.p_value, abs=0.03)


@pytest.mark.parametrize("n", [5, 8, 12])
def test_p_of_a_mean_of_few_examples_is_scipys_exact_sign_flip_test(n):
    draw = np.random.default_rng(n)
    for shift in (0.0, 0.1, 0.3):
        differences = draw.normal(shift, 0.15, n)
        step, other = means("rougeL", 0.5 + differences), means("rougeL", [0.5] * n)
        expected = permutation_test(
            (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
        ).pvalue
        assert compare_steps(step, other)["p_value"] == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["f1", "matthews", "spearman"])
def test_p_of_other_metrics_is_the_share_of_all_swaps(metric):
    """Every way to swap the two predictions of an example, scored by scikit-learn and scipy."""
    draw = np.random.default_rng(3)
    gold = draw.integers(0, 3, 7)
    one, two = gold.copy(), draw.integers(0, 3, 7)
    functions = {
        "f1": lambda guess: f1_score(gold, guess, average="macro"),
        "matthews": lambda guess: matthews_corrcoef(gold, guess),
        "spearman": lambda guess: spearmanr(gold, guess).statistic,
    }
    value = functions[metric]
    swapped = [np.array(each) == 1 for each in itertools.product((0, 1), repeat=7)]
    differences = [value(np.where(each, two, one)) - value(np.where(each, one, two)) for each in swapped]
    observed = abs(value(one) - value(two))
    expected = np.mean([abs(difference) >= observed - 1e-9 for difference in differences])
    step, other = (
        Statistics(metric=metric, signature="s", examples="e", rows=np.stack([guess, gold], axis=1).tolist())
        for guess in (one, two)
    )
    assert compare_steps(step, other)["p_value"] == pytest.approx(expected)
    assert expected < 0.2


@pytest.mark.parametrize("n", [6, 20, 200])
def test_interval_of_a_difference_of_means_is_that_of_the_paired_t_test(n):
    draw = np.random.default_rng(n)
    other = draw.uniform(0.2, 0.6, n)
    step = other + draw.normal(0.02, 0.1, n)
    expected = ttest_rel(100 * step, 100 * other).confidence_interval(0.95)
    found = difference_interval(means("rougeL", step), means("rougeL", other))
    width = expected.high - expected.low
    assert found == pytest.approx((expected.low, expected.high), abs=0.05 * width)


def test_interval_of_a_score_is_symmetric_on_a_scale_without_limits():
    values = np.random.default_rng(1).beta(8, 1, 30)
    found = metric_interval(means("rougeL", values))
    draws = np.random.default_rng(12345).integers(0, 30, size=(1000, 30))
    assert found == pytest.approx(expected_interval(100 * values.mean(), 100 * values[draws].mean(1), 30))
    assert found[1] < 100
    losses = means("cross_entropy", values)
    resampled = values[draws].mean(1)
    expected = expected_interval(values.mean(), resampled, 30, (0, math.inf))
    assert metric_interval(losses) == pytest.approx(expected)


@pytest.mark.parametrize(("metric", "rarest"), [("f1", 2), ("f1", 5), ("recall", 3), ("f1_macro", 2)])
def test_interval_without_differing_outputs_is_at_least_one_flip_of_the_rarest_class(metric, rarest):
    """Of 2,000 examples Wilson's upper end is 0.2 %, but one of the rarest class may be 3 points."""
    gold = np.repeat([0, 1, 2], [1200, 800 - rarest, rarest])
    flipped = gold.copy()
    flipped[-1] = 0
    if metric == "f1_macro":
        rows = [np.concatenate([np.eye(3)[gold]] * 2, axis=1) for _ in range(2)]
        rows[1][-1, 2] = 0  # the label is missing
    else:
        rows = [np.stack([guess, gold], axis=1) for guess in (gold, flipped)]
    same, worse = (
        Statistics(metric=metric, signature="s", examples="e", rows=each.tolist()) for each in rows
    )
    loss = metric_value(same) - metric_value(worse)
    low, high = compare_steps(same, same)["ci95"]
    assert low <= -loss < -2
    assert high > 0
    back = compare_steps(worse, worse)["ci95"]
    assert back[1] >= loss


def test_a_p_value_below_the_resolution_of_the_resamples_is_that_of_the_t_test():
    """For a mean of 400 examples the swaps' normal tail and Student's paired test agree."""
    draw = np.random.default_rng(4)
    other = draw.normal(0.5, 0.1, 400)
    for shift in (0.022, 0.025, 0.03):  # 4 to 6 standard errors
        step = other + draw.normal(shift, 0.1, 400)
        pair = [
            Statistics(metric="rougeL", signature="s", examples="e", rows=[[value] for value in values])
            for values in (step.tolist(), other.tolist())
        ]
        expected = ttest_rel(step, other).pvalue
        assert compare_steps(*pair)["p_value"] == pytest.approx(expected, rel=1.5)
        assert expected < 2 / 1001


def test_holm_corrects_for_the_number_of_comparisons():
    p_values = [0.001, 0.01, 0.03, 0.005, 0.6]  # times 5, 3, 2, 4 and 1, by their ranks
    assert holm(p_values) == pytest.approx([5 * 0.001, 3 * 0.01, 2 * 0.03, 4 * 0.005, 0.6])
    assert holm([0.02, 0.021, 0.9, 0.7]) == pytest.approx([0.08, 0.08, 1.0, 1.0])  # in order, at most 1
    assert holm([]) == []
    # all rejected at 5 % are those of Holm's step-down procedure
    draw = np.random.default_rng(0).uniform(size=12) ** 4
    rejected = set()
    for rank, at in enumerate(np.argsort(draw)):
        if draw[at] > 0.05 / (12 - rank):
            break
        rejected.add(int(at))
    assert {at for at, value in enumerate(holm(draw.tolist())) if value <= 0.05} == rejected


def test_accuracy_uses_mcnemar_exact():
    gold = [1] * 40
    one = [1] * 32 + [0] * 8  # 10 right that the other gets wrong, 2 the other way round
    other = [1] * 22 + [0] * 10 + [1] * 2 + [0] * 6
    result = compare_steps(
        score_labels(["accuracy"], one, gold)["accuracy"].statistics,
        score_labels(["accuracy"], other, gold)["accuracy"].statistics,
    )
    assert result["difference"] == pytest.approx(100 * 8 / 40)
    # 2 * (C(12,0) + C(12,1) + C(12,2)) / 2^12
    assert result["p_value"] == pytest.approx(2 * (1 + 12 + 66) / 4096)


def test_f1_difference_equals_sklearn():
    gold = [0, 1, 2, 0, 1, 2, 0, 1]
    one, other = [0, 1, 2, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1, 0, 2]
    result = compare_steps(
        score_labels(["f1"], one, gold)["f1"].statistics, score_labels(["f1"], other, gold)["f1"].statistics
    )
    expected = 100 * (f1_score(gold, one, average="macro") - f1_score(gold, other, average="macro"))
    assert result["difference"] == pytest.approx(expected)


def test_other_examples_are_refused():
    one = score_texts(["bleu"], ["a b"], [["a b"]])["bleu"].statistics
    other = score_texts(["bleu"], ["a b"], [["a c"]])["bleu"].statistics
    with raises_code("other-examples", InputError):
        compare_steps(one, other)
    with raises_code("other-metric", InputError):
        compare_steps(one, score_texts(["chrf"], ["a b"], [["a b"]])["chrf"].statistics)
    with raises_code("count-mismatch", InputError):
        compare_steps(one, one.model_copy(update={"rows": one.rows * 2}))


def test_intervals_widen_with_their_confidence_and_095_is_the_reports():
    step, other = statistics("bleu", predictions(0.3, 5)), statistics("bleu", predictions(0.3, 6))
    assert list(difference_interval(step, other)) == compare_steps(step, other)["ci95"]
    for interval in (lambda c: difference_interval(step, other, c), lambda c: metric_interval(step, c)):
        (a, d), (b, c) = interval(0.99), interval(0.8)
        assert a < b < c < d
    assert metric_interval(step) == student_interval(step)


def test_interval_of_hits_is_wilsons():
    from scipy.stats import binomtest

    score = score_labels(["accuracy"], [1, 1, 0, 1, 0], [1, 1, 1, 1, 0])["accuracy"]
    for confidence in (0.95, 0.8):
        reference = binomtest(4, 5).proportion_ci(confidence, method="wilson")
        assert metric_interval(score.statistics, confidence) == pytest.approx(
            (100 * reference.low, 100 * reference.high)
        )
    assert metric_interval(score.statistics) == tuple(score.ci95)


def score_test(gained, lost, n, difference):
    """The score statistic, with the most likely P(lost) at this difference searched for, not solved for."""

    def unlikely(share):
        cells = (share + difference, share, 1 - 2 * share - difference)
        counts = (gained, lost, n - gained - lost)
        return -sum(k * math.log(max(p, 1e-300)) for k, p in zip(counts, cells, strict=True))

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    share = minimize_scalar(unlikely, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    return (gained - lost - n * difference) / math.sqrt(n * (2 * share + difference - difference**2))


@pytest.mark.parametrize(("gained", "lost", "n"), [(10, 2, 40), (3, 9, 200), (1, 4, 30), (6, 6, 50)])
def test_interval_of_accuracy_holds_the_differences_that_a_score_test_does_not_reject(gained, lost, n):
    low, high = tango_interval(gained, lost, n, 0.9)
    middle, z = (gained - lost) / n, norm.ppf(0.95)
    wanted = [
        100 * brentq(lambda d, at=at: score_test(gained, lost, n, d) - at, *ends)
        for at, ends in ((z, (-0.9, middle)), (-z, (middle, 0.9)))
    ]
    assert [low, high] == pytest.approx(wanted, abs=1e-3)


def test_no_changed_prediction_of_few_examples_does_not_show_that_nothing_was_lost():
    few = score_labels(["accuracy"], [1] * 30, [1] * 30)["accuracy"].statistics
    many = score_labels(["accuracy"], [1] * 3000, [1] * 3000)["accuracy"].statistics
    z2 = norm.ppf(0.975) ** 2
    assert compare_steps(few, few)["ci95"] == pytest.approx([-100 * z2 / (30 + z2), 100 * z2 / (30 + z2)])
    assert difference_interval(many, many)[1] == pytest.approx(0.13, abs=0.01)


def means(metric, values):
    return statistics("bleu", GOOD).model_copy(
        update={"metric": metric, "rows": [[float(v)] for v in values]}
    )


def test_an_error_has_no_greatest_value_so_equal_ones_have_no_interval():
    """Eight rows of 500 % once gave (467.6, 100.0), of which a gate judged the 100."""
    assert metric_interval(means("relative_error", [5.0] * 8)) is None
    low, high = metric_interval(means("relative_error", [4.0, 5.0] * 4))
    assert 400 <= low < 450 < high <= 500


@pytest.mark.parametrize("other", [0, 1, 3, 5])
def test_an_interval_of_nearly_equal_values_is_as_wide_as_what_was_not_seen(other):
    """One row of another value must not make eight rows certain: Wilson's upper end of none in 8 is lost."""
    low, high = metric_interval(means("rouge1", [1.0] * (8 - other) + [0.99] * other))
    value = 100 - other / 8
    assert low <= value * (1 - wilson_interval(0, 8)[1] / 100)
    assert value <= high <= 100
