"""Whether a step loses quality against the baseline: by which metrics, and whether that can be decided.

The first metric of a report is its main one. The others are judged too, except those that are perfect for the
baseline by definition: they measure how far outputs differ, which is not a loss where there are references.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from smelt.core.messages import Message, count_text, warning
from smelt.evaluate.metrics.allclose import ALLCLOSE
from smelt.evaluate.metrics.detection import DETECTION_AP
from smelt.evaluate.metrics.registry import METRICS, TOP1_METRIC, WINDOW_METRICS
from smelt.evaluate.report import view
from smelt.evaluate.report.schema import ReportData, StepReport
from smelt.evaluate.report.step_schema import ScoresOnTest

# If an interval extends further below the baseline than this fraction of its score, more samples are needed.
_MAX_UNCERTAIN_DROP = 0.05
# With fewer samples, a loss must be large to be significant.
_MIN_EXAMPLES = 20
# Of metrics that are perfect for the baseline, so that any change of outputs is worse, losses up to this are
# accepted unless a gate decides.
NEGLIGIBLE_POINTS = 1.0
# Of several worse steps, how large the p-value of another may be that may be worse as well.
_MAX_DOUBTFUL_P_VALUE = 0.5

Scored = StepReport | ScoresOnTest


def judged_metrics(report: ReportData) -> list[str]:
    """Return the metrics whose losses count; the main one is first."""
    names = view.metric_names(report)
    return [
        name
        for name in names
        if name == names[0] or _is_chosen_limit(name) or not _compares_with_baseline(name)
    ]


def _compares_with_baseline(metric: str) -> bool:
    return metric in METRICS and METRICS[metric].compares_with_baseline


def _is_chosen_limit(metric: str) -> bool:
    """Return whether a recipe that lists the metric says which change of outputs matters."""
    return metric in (ALLCLOSE.name, DETECTION_AP.name)


def signed_value(scored: Scored, metric: str) -> float:
    """Return the score in the metric's unit; higher is better."""
    score = scored.quality[metric]
    return score.value if score.higher_is_better else -score.value


def signed_difference(scored: Scored, metric: str) -> float:
    """Return the difference from the baseline in the metric's unit; a loss is negative."""
    sign = 1 if scored.quality[metric].higher_is_better else -1
    return sign * scored.against_baseline[metric].difference


def is_worse(scored: Scored, metric: str) -> bool:
    """Return whether a step loses significantly, as the asterisk of the difference shows."""
    if metric not in scored.against_baseline or metric not in scored.quality:
        return False
    return view.is_significant(scored.against_baseline[metric]) and signed_difference(scored, metric) < 0


def passes_gates(step: StepReport, metric: str) -> bool:
    """Return whether the step has gates on the metric, and passes all of them."""
    verdicts = [gate.passed for gate in step.gates if gate.metric == metric]
    return bool(verdicts) and all(verdicts)


def is_negligible_loss(step: Scored, metric: str) -> bool:
    """Return whether a step loses little agreement with the baseline, if that is the metric.

    `top1` counts too, if scored: close outputs may still have another maximum.
    """
    if not _compares_with_baseline(metric):
        return False
    tested = step.against_baseline
    judged = [metric, *(name for name in (TOP1_METRIC,) if name in tested)]
    return all(abs(tested[name].difference) <= NEGLIGIBLE_POINTS for name in judged)


def notable_losses(step: Scored, metrics: Sequence[str]) -> list[str]:
    """Return the metrics by which a step is significantly worse, other than by a negligible loss."""
    return [metric for metric in metrics if is_worse(step, metric) and not is_negligible_loss(step, metric)]


def refused_losses(step: StepReport, metrics: Sequence[str]) -> list[str]:
    """Return the metrics by which a step is significantly worse, without a gate that allows it.

    Where the gates on the main metric pass, they decide; losses of other metrics are then only warned of.
    """
    if passes_gates(step, metrics[0]):
        return []
    return [metric for metric in notable_losses(step, metrics) if not passes_gates(step, metric)]


def is_decidable(scored: Scored, metric: str) -> bool:
    """Return whether there are enough examples for any loss to be significant.

    The smallest p-value of a paired test of n examples is 2 / 2^n: below 0.05 from 6 on.
    """
    n = scored.against_baseline[metric].n
    if n is None and metric not in WINDOW_METRICS:  # whose n are tokens
        n = scored.quality[metric].n
    return n is None or view.is_significant_p_value(2.0 ** (1 - n))


def accepts_loss(step: StepReport, metric: str) -> bool:
    """Return whether a loss of the main metric is accepted, whatever a test finds."""
    return passes_gates(step, metric) or is_negligible_loss(step, metric)


def is_uncertain(scored: Scored, metric: str) -> bool:
    """Return whether there are too few examples to exclude a loss.

    Of 30 translations, 7.5 BLEU may be chance.
    """
    score, difference = scored.quality[metric], scored.against_baseline[metric]
    largest_drop = -min(_interval(scored, metric))
    drop_in_doubt = largest_drop > _MAX_UNCERTAIN_DROP * abs(score.value - difference.difference)
    # an interval below zero that is yet not significant is unreliable
    return score.n < _MIN_EXAMPLES or drop_in_doubt or shows_loss(scored, metric)


def shows_loss(scored: Scored, metric: str) -> bool:
    """Return whether the whole interval of the difference is a loss, significant or not."""
    return max(_interval(scored, metric)) < 0


def _interval(scored: Scored, metric: str) -> list[float]:
    """Return the ends of the difference's interval, losses below 0."""
    sign = 1 if scored.quality[metric].higher_is_better else -1
    return [sign * end for end in scored.against_baseline[metric].ci95 or (-math.inf, math.inf)]


def samples_text(scored: Scored, metric: str) -> str:
    """Return how much was scored, such as `30 samples`."""
    if metric in WINDOW_METRICS:
        return "a short text"
    return count_text(scored.quality[metric].n, view.sample_unit(metric))


def quality_warnings(
    step: StepReport, scored: Scored, metrics: Sequence[str], baseline: str, num_worse: int
) -> list[Message]:
    """Return what a user needs to know about the losses before deploying a recommended step.

    Codes: `accepted-loss`, it is worse, but a gate or the metric accepts that; `loss-without-gate`, it is
    worse by another metric than the one whose gate it passes; `significantly-worse`, it is worse on test, but
    not on validation, where it was chosen; `too-few-examples`, there are too few to decide; `best-of-many`,
    it is nearly worse, as many other steps are; `metric-not-judged`, a metric cannot be tested.

    Args:
        step: the recommended step.
        scored: its scores on test where it was scored there, else the step.
        metrics: `judged_metrics`.
        baseline: name of the baseline.
        num_worse: how many other steps are significantly worse.
    """
    main = metrics[0]
    worse_metrics = [metric for metric in metrics if is_worse(scored, metric)]
    messages = [_worse_warning(step, scored, metric, baseline) for metric in worse_metrics]
    warnings = [message for message in messages if message]
    if ungated := [metric for metric in worse_metrics if _lacks_gate(step, scored, metric)]:
        labels = " and ".join(view.metric_label(name) for name in ungated)
        warnings.append(
            warning(
                "loss-without-gate",
                f"{step.name} is also significantly worse by {labels}, without a gate: only"
                f" {view.metric_label(main)} has one. Set gates on {', '.join(ungated)} too.",
            )
        )
    if not is_worse(scored, main):
        if is_uncertain(scored, main):
            warnings.append(
                warning(
                    "too-few-examples",
                    f"Not enough data ({samples_text(scored, main)}) to decide whether {step.name} is worse"
                    f" than {baseline}. Score it on more samples before deploying it.",
                )
            )
        warnings += _many_steps_warning(step, main, num_worse)
    unjudged = [
        view.metric_label(metric)
        for metric in metrics[1:]
        if metric in scored.against_baseline and not is_decidable(scored, metric)
    ]
    if unjudged and is_decidable(scored, main):
        text = f"{', '.join(unjudged)} of {step.name} cannot be tested, as too few examples have a value"
        warnings.append(warning("metric-not-judged", f"{text} of their own. Set a gate on it."))
    return warnings


def _is_unseen_loss(step: StepReport, scored: Scored, metric: str) -> bool:
    """Return whether a loss on test is not one on validation, where the step was chosen."""
    return scored is not step and not is_worse(step, metric)


def _lacks_gate(step: StepReport, scored: Scored, metric: str) -> bool:
    """Return whether a loss is accepted only because of the gate on the main metric."""
    accepted = passes_gates(step, metric) or is_negligible_loss(scored, metric)
    return not accepted and not _is_unseen_loss(step, scored, metric)


def _worse_warning(step: StepReport, scored: Scored, metric: str, baseline: str) -> Message | None:
    """Return a warning about a loss, except one that lacks a gate."""
    loss_text = f"{step.name} is significantly worse than {baseline} by {view.metric_label(metric)}"
    if passes_gates(step, metric):
        return warning("accepted-loss", f"{loss_text}; its gate allows that.")
    if is_negligible_loss(scored, metric):
        return warning(
            "accepted-loss", f"{loss_text}. Losses up to {NEGLIGIBLE_POINTS:g} point are accepted."
        )
    if _is_unseen_loss(step, scored, metric):
        return warning(
            "significantly-worse", f"{loss_text} on test; on validation, where it was chosen, it is not."
        )
    return None


def _many_steps_warning(step: StepReport, metric: str, num_worse: int) -> list[Message]:
    """Return a warning if many steps are worse and this one nearly is: one of many may escape by chance."""
    p_value = step.against_baseline[metric].p_value
    doubtful = min(_MAX_DOUBTFUL_P_VALUE, view.SIGNIFICANCE_LEVEL * (num_worse + 1))
    if num_worse < 2 or signed_difference(step, metric) >= 0 or p_value >= doubtful:
        return []
    if passes_gates(step, metric):
        return []
    text = f"{num_worse} other steps are significantly worse, and {step.name} nearly is"
    return [
        warning(
            "best-of-many",
            f"{text} ({view.p_value_text(p_value)}): of many steps that lose, one may miss significance by"
            " chance. Score it on more samples before deploying it.",
        )
    ]
