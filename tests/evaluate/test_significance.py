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
    "a", "man", "and", "the", "dog", "run", "over", "green", "grass", "near", "white", "fence", "by", "river",
    "with", "hat",
]  # fmt: skip
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
    better_statistics, worse_statistics = statistics(metric, GOOD), statistics(metric, POOR)
    result = compare_steps(better_statistics, worse_statistics)
    sign = 1 if METRICS[metric].higher_is_better else -1
    low, high = sorted(sign * end for end in result["ci95"])
    assert sign * result["difference"] > 5
    assert 0 < low <= sign * result["difference"] <= high
    assert 0 < result["p_value"] < 2 / 1001  # more comparisons may be made than 1000 resamples could bear
    reversed_result = compare_steps(worse_statistics, better_statistics)
    assert reversed_result["difference"] == pytest.approx(-result["difference"])
    assert reversed_result["ci95"] == pytest.approx([-result["ci95"][1], -result["ci95"][0]])


def test_step_compared_with_itself_has_no_difference():
    for same_statistics in (
        statistics("bleu", GOOD),
        score_labels(["accuracy"], [1, 0], [1, 1])["accuracy"].statistics,
    ):
        comparison = compare_steps(same_statistics, same_statistics)
        assert (comparison["difference"], comparison["p_value"]) == (0.0, 1.0)


@pytest.mark.parametrize("metric", [m for m in GRADED_METRICS if METRICS[m].limits == (0, 100)])
def test_interval_without_changes_depends_on_n(metric):
    """Wilson's upper end of 0 changed examples of n, z^2 / (n + z^2), of what they can lose, and gain."""
    for n in (8, 40, 400):
        same_statistics = statistics(metric, GOOD)
        same_statistics = same_statistics.model_copy(update={"rows": (same_statistics.rows * 5)[:n]})
        low, high = compare_steps(same_statistics, same_statistics)["ci95"]
        z2 = NormalDist().inv_cdf(0.975) ** 2
        share, value = z2 / (n + z2), metric_value(same_statistics)
        assert (low, high) == (pytest.approx(-value * share), pytest.approx((100 - value) * share))


def test_interval_is_wide_with_few_changed_examples():
    base = statistics("rouge1", GOOD)
    base = base.model_copy(update={"rows": [[0.5]] * 100})

    def changed(k):
        changed_rows = [[0.4]] * k + [[0.5]] * (100 - k)
        return difference_interval(base.model_copy(update={"rows": changed_rows}), base)

    # one in 100 costs 0.1 points, with a standard error of 0.1 and 5 degrees of freedom; Wilson's upper end
    # of 0 of 100 is 3.7 %, and each of these has 50 points to lose
    assert changed(1)[0] == pytest.approx(-0.1 - 0.1 * t.ppf(0.975, 5) - 50 * 0.037, abs=0.03)
    assert changed(1)[0] < changed(6)[0] < -0.6
    assert wilson_interval(0, 100)[1] == pytest.approx(3.70, abs=0.01)


def test_degenerate_interval_of_equal_differences_is_widened():
    equal_statistics = statistics("rouge1", GOOD).model_copy(update={"rows": [[0.5]] * 8})
    worse_statistics = equal_statistics.model_copy(update={"rows": [[0.4]] * 8})
    low, high = difference_interval(worse_statistics, equal_statistics)
    assert low < -10 < high
    nats = equal_statistics.model_copy(update={"metric": "bits_per_byte", "rows": [[400.0, 100, 500]] * 8})
    worse_nats = nats.model_copy(update={"rows": [[410.0, 100, 500]] * 8})
    assert difference_interval(worse_nats, nats) is None


@pytest.mark.parametrize("metric", ["bleu", "chrf", "rouge1"])
def test_interval_of_equal_values_depends_on_n(metric):
    perfect = score_texts([metric], ["a man and a dog run"] * 8, [["a man and a dog run"]] * 8)[metric]
    assert perfect.value == pytest.approx(100)
    low, high = perfect.ci95
    assert (low, high) == (pytest.approx(100 - 32.4, abs=0.1), pytest.approx(100))


def test_equal_perplexities_have_no_interval():
    equal_rows = [[400.0, 100, 500]] * 8
    equal_statistics = statistics("bleu", GOOD).model_copy(
        update={"metric": "perplexity", "rows": equal_rows}
    )
    assert student_interval(equal_statistics) is None
    assert difference_interval(equal_statistics, equal_statistics) is None


@pytest.mark.parametrize("metric", GRADED_METRICS)
def test_p_value_of_few_examples_is_bounded_by_sign_test(metric):
    better_statistics, worse_statistics = statistics(metric, GOOD), statistics(metric, POOR)
    for n in range(1, 9):
        first_part, second_part = (
            s.model_copy(update={"rows": s.rows[:n]}) for s in (better_statistics, worse_statistics)
        )
        assert compare_steps(first_part, second_part)["p_value"] >= 2 / 2**n
    five = compare_steps(
        *(s.model_copy(update={"rows": [s.rows[0]] * 5}) for s in (better_statistics, worse_statistics))
    )
    assert five["p_value"] == 2 / 2**5  # all are the same, and yet no 2 / 1001


def test_equal_examples_are_excluded_from_sign_bound():
    good_statistics = statistics("chrf", GOOD)
    partly_changed = [*statistics("chrf", POOR).rows[:4], *good_statistics.rows[4:]]
    comparison = compare_steps(good_statistics.model_copy(update={"rows": partly_changed}), good_statistics)
    assert comparison["difference"] < 0
    assert comparison["p_value"] >= 2 / 2**4


def test_few_examples_have_no_interval():
    good_score, poor = (score_texts(["bleu"], [t], [[REFERENCES[0]]])["bleu"] for t in (GOOD[0], POOR[0]))
    assert (good_score.ci95, metric_interval(good_score.statistics)) == (None, None)
    assert compare_steps(good_score.statistics, poor.statistics) == {
        "difference": good_score.value - poor.value, "ci95": None, "p_value": 1.0, "n": 1
    }  # fmt: skip
    for confidence, min_count in ((0.5, 2), (0.9, 5), (0.95, 6), (0.99, 8), (0.999, 11)):
        assert min_examples("bleu", confidence) == min_count
        assert 2 / 2**min_count <= 1 - confidence < 2 / 2 ** (min_count - 1)
        for n in (min_count - 1, min_count):
            step_part, other = (
                s.model_copy(update={"rows": s.rows[:n]})
                for s in (statistics("bleu", GOOD), statistics("bleu", POOR))
            )
            assert (metric_interval(step_part, confidence) is None) == (n < min_count)
            assert (difference_interval(step_part, other, confidence) is None) == (n < min_count)
    hits = score_labels(["accuracy"], [1], [1])["accuracy"]  # Wilson's and Tango's hold for one
    assert hits.ci95 == metric_interval(hits.statistics)
    assert compare_steps(hits.statistics, hits.statistics)["ci95"] is not None


def test_different_windows_use_smaller_window_count():
    few_windows, many_windows = (
        score_windows(["perplexity"], [9.0] * n, [4] * n, [12] * n, "window:8", ["x"])[
            "perplexity"
        ].statistics
        for n in (5, 9)
    )
    for step_windows, other_windows in ((few_windows, many_windows), (many_windows, few_windows)):
        comparison = compare_steps(step_windows, other_windows)
        assert comparison["ci95"] is None
        assert comparison["p_value"] >= 2 / 2**5


def test_random_difference_is_not_significant():
    result = compare_steps(statistics("bleu", predictions(0.3, 5)), statistics("bleu", predictions(0.3, 6)))
    assert result["p_value"] > 0.05
    assert result["ci95"][0] < 0 < result["ci95"][1]


def test_difference_and_p_agree_with_sacrebleu_approximate_randomization():
    near_texts = predictions(0.17, 7)
    comparison = compare_steps(statistics("bleu", near_texts), statistics("bleu", GOOD))
    test = PairedTest(
        [("good", GOOD), ("near", near_texts)],
        {"BLEU": BLEU(references=[REFERENCES])},
        None,
        test_type="ar",
        n_samples=10_000,
    )
    _, scores = test()
    first, second = scores["BLEU"]
    assert comparison["difference"] == pytest.approx(second.score - first.score, abs=1e-6)
    assert 0.01 < second.p_value < 0.5
    assert comparison["p_value"] == pytest.approx(second.p_value, abs=0.03)


@pytest.mark.parametrize("n", [5, 8, 12])
def test_p_value_of_few_examples_equals_scipy_sign_flip_test(n):
    draw = np.random.default_rng(n)
    for mean_shift in (0.0, 0.1, 0.3):
        differences = draw.normal(mean_shift, 0.15, n)
        step, other = means("rougeL", 0.5 + differences), means("rougeL", [0.5] * n)
        expected = permutation_test(
            (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
        ).pvalue
        assert compare_steps(step, other)["p_value"] == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["f1", "matthews", "spearman"])
def test_p_value_of_other_metrics_equals_exact_permutation_test(metric):
    """Every way to swap the two predictions of an example, scored by scikit-learn and scipy."""
    draw = np.random.default_rng(3)
    gold = draw.integers(0, 3, 7)
    first_classes, second_classes = gold.copy(), draw.integers(0, 3, 7)
    functions = {
        "f1": lambda guess: f1_score(gold, guess, average="macro"),
        "matthews": lambda guess: matthews_corrcoef(gold, guess),
        "spearman": lambda guess: spearmanr(gold, guess).statistic,
    }
    value = functions[metric]
    swapped = [np.array(swap) == 1 for swap in itertools.product((0, 1), repeat=7)]
    differences = [
        value(np.where(swap, second_classes, first_classes))
        - value(np.where(swap, first_classes, second_classes))
        for swap in swapped
    ]
    observed = abs(value(first_classes) - value(second_classes))
    expected = np.mean([abs(difference) >= observed - 1e-9 for difference in differences])
    step, other = (
        Statistics(
            metric=metric, signature="s", examples="e", rows=np.stack([predicted, gold], axis=1).tolist()
        )
        for predicted in (first_classes, second_classes)
    )
    assert compare_steps(step, other)["p_value"] == pytest.approx(expected)
    assert expected < 0.2


@pytest.mark.parametrize("n", [6, 20, 200])
def test_interval_of_mean_difference_equals_paired_t_test(n):
    draw = np.random.default_rng(n)
    other = draw.uniform(0.2, 0.6, n)
    step = other + draw.normal(0.02, 0.1, n)
    expected = ttest_rel(100 * step, 100 * other).confidence_interval(0.95)
    interval = difference_interval(means("rougeL", step), means("rougeL", other))
    width = expected.high - expected.low
    assert interval == pytest.approx((expected.low, expected.high), abs=0.05 * width)


def test_interval_of_an_unbounded_score_is_symmetric():
    values = np.random.default_rng(1).beta(8, 1, 30)
    interval = metric_interval(means("rougeL", values))
    draws = np.random.default_rng(12345).integers(0, 30, size=(1000, 30))
    assert interval == pytest.approx(expected_interval(100 * values.mean(), 100 * values[draws].mean(1), 30))
    assert interval[1] < 100
    losses = means("cross_entropy", values)
    resampled = values[draws].mean(1)
    expected = expected_interval(values.mean(), resampled, 30, (0, math.inf))
    assert metric_interval(losses) == pytest.approx(expected)


@pytest.mark.parametrize(("metric", "rarest"), [("f1", 2), ("f1", 5), ("recall", 3), ("f1_macro", 2)])
def test_interval_without_differing_outputs_covers_one_flip_of_the_rarest_class(metric, rarest):
    """Of 2,000 examples Wilson's upper end is 0.2 %, but one of the rarest class may be 3 points."""
    gold = np.repeat([0, 1, 2], [1200, 800 - rarest, rarest])
    flipped = gold.copy()
    flipped[-1] = 0
    if metric == "f1_macro":
        class_rows = [np.concatenate([np.eye(3)[gold]] * 2, axis=1) for _ in range(2)]
        class_rows[1][-1, 2] = 0  # the label is missing
    else:
        class_rows = [np.stack([predicted, gold], axis=1) for predicted in (gold, flipped)]
    equal_statistics, worse_statistics = (
        Statistics(metric=metric, signature="s", examples="e", rows=statistic_rows.tolist())
        for statistic_rows in class_rows
    )
    loss = metric_value(equal_statistics) - metric_value(worse_statistics)
    low, high = compare_steps(equal_statistics, equal_statistics)["ci95"]
    assert low <= -loss < -2
    assert high > 0
    worse_interval = compare_steps(worse_statistics, worse_statistics)["ci95"]
    assert worse_interval[1] >= loss


def test_p_value_below_resampling_resolution_equals_t_test():
    """For a mean of 400 examples the swaps' normal tail and Student's paired test agree."""
    draw = np.random.default_rng(4)
    other = draw.normal(0.5, 0.1, 400)
    for mean_shift in (0.022, 0.025, 0.03):  # 4 to 6 standard errors
        step = other + draw.normal(mean_shift, 0.1, 400)
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
    rejected_tests = set()
    for rank, test_index in enumerate(np.argsort(draw)):
        if draw[test_index] > 0.05 / (12 - rank):
            break
        rejected_tests.add(int(test_index))
    assert {
        test_index for test_index, value in enumerate(holm(draw.tolist())) if value <= 0.05
    } == rejected_tests


def test_accuracy_uses_mcnemar_exact():
    gold = [1] * 40
    first_classes = [1] * 32 + [0] * 8  # 10 right that the other gets wrong, 2 the other way round
    other = [1] * 22 + [0] * 10 + [1] * 2 + [0] * 6
    result = compare_steps(
        score_labels(["accuracy"], first_classes, gold)["accuracy"].statistics,
        score_labels(["accuracy"], other, gold)["accuracy"].statistics,
    )
    assert result["difference"] == pytest.approx(100 * 8 / 40)
    # 2 * (C(12,0) + C(12,1) + C(12,2)) / 2^12
    assert result["p_value"] == pytest.approx(2 * (1 + 12 + 66) / 4096)


def test_f1_difference_equals_sklearn():
    gold = [0, 1, 2, 0, 1, 2, 0, 1]
    first_classes, other = [0, 1, 2, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1, 0, 2]
    result = compare_steps(
        score_labels(["f1"], first_classes, gold)["f1"].statistics,
        score_labels(["f1"], other, gold)["f1"].statistics,
    )
    expected = 100 * (f1_score(gold, first_classes, average="macro") - f1_score(gold, other, average="macro"))
    assert result["difference"] == pytest.approx(expected)


def test_different_examples_are_rejected():
    base_statistics = score_texts(["bleu"], ["a b"], [["a b"]])["bleu"].statistics
    other = score_texts(["bleu"], ["a b"], [["a c"]])["bleu"].statistics
    with raises_code("other-examples", InputError):
        compare_steps(base_statistics, other)
    with raises_code("other-metric", InputError):
        compare_steps(base_statistics, score_texts(["chrf"], ["a b"], [["a b"]])["chrf"].statistics)
    with raises_code("count-mismatch", InputError):
        compare_steps(base_statistics, base_statistics.model_copy(update={"rows": base_statistics.rows * 2}))


def test_intervals_widen_with_confidence():
    step, other = statistics("bleu", predictions(0.3, 5)), statistics("bleu", predictions(0.3, 6))
    assert list(difference_interval(step, other)) == compare_steps(step, other)["ci95"]
    for interval in (lambda c: difference_interval(step, other, c), lambda c: metric_interval(step, c)):
        (a, d), (b, c) = interval(0.99), interval(0.8)
        assert a < b < c < d
    assert metric_interval(step) == student_interval(step)


def test_interval_of_hits_is_wilson_interval():
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
def test_accuracy_interval_inverts_score_test(gained, lost, n):
    low, high = tango_interval(gained, lost, n, 0.9)
    middle, z = (gained - lost) / n, norm.ppf(0.95)
    expected_ends = [
        100 * brentq(lambda d, target=bound: score_test(gained, lost, n, d) - target, *ends)
        for bound, ends in ((z, (-0.9, middle)), (-z, (middle, 0.9)))
    ]
    assert [low, high] == pytest.approx(expected_ends, abs=1e-3)


def test_interval_of_few_unchanged_predictions_is_wide():
    few_statistics = score_labels(["accuracy"], [1] * 30, [1] * 30)["accuracy"].statistics
    many_statistics = score_labels(["accuracy"], [1] * 3000, [1] * 3000)["accuracy"].statistics
    z2 = norm.ppf(0.975) ** 2
    assert compare_steps(few_statistics, few_statistics)["ci95"] == pytest.approx(
        [-100 * z2 / (30 + z2), 100 * z2 / (30 + z2)]
    )
    assert difference_interval(many_statistics, many_statistics)[1] == pytest.approx(0.13, abs=0.01)


def means(metric, values):
    return statistics("bleu", GOOD).model_copy(
        update={"metric": metric, "rows": [[float(v)] for v in values]}
    )


def test_unbounded_equal_errors_have_no_interval():
    """Eight rows of 500 % once gave (467.6, 100.0), of which a gate judged the 100."""
    assert metric_interval(means("relative_error", [5.0] * 8)) is None
    low, high = metric_interval(means("relative_error", [4.0, 5.0] * 4))
    assert 400 <= low < 450 < high <= 500


@pytest.mark.parametrize("other", [0, 1, 3, 5])
def test_interval_of_nearly_equal_values_allows_unseen_examples(other):
    """One row of another value must not make eight rows certain: Wilson's upper end of none in 8 is lost."""
    low, high = metric_interval(means("rouge1", [1.0] * (8 - other) + [0.99] * other))
    value = 100 - other / 8
    assert low <= value * (1 - wilson_interval(0, 8)[1] / 100)
    assert value <= high <= 100
