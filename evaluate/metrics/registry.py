"""The metrics, and queries on all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from smelt.core.errors import InputError, did_you_mean
from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType
from smelt.data.tasks import ALL_TASKS, task_traits, tasks_with
from smelt.evaluate.metrics.agreement import AGREEMENT, RELATIVE_ERROR, TOP1
from smelt.evaluate.metrics.allclose import ALLCLOSE
from smelt.evaluate.metrics.answers import EXACT_MATCH, TOKEN_F1
from smelt.evaluate.metrics.average_precision import MEAN_AVERAGE_PRECISION
from smelt.evaluate.metrics.bertscore import BERTSCORE
from smelt.evaluate.metrics.bleu import BLEU
from smelt.evaluate.metrics.choices import ACC, ACC_NORM
from smelt.evaluate.metrics.chrf import CHRF
from smelt.evaluate.metrics.classes import ACCURACY, F1_OF_CLASSES, MATTHEWS, PRECISION, RECALL
from smelt.evaluate.metrics.cross_entropy import CROSS_ENTROPY
from smelt.evaluate.metrics.detection import DETECTION_AP
from smelt.evaluate.metrics.entities import ENTITY_F1, ENTITY_PRECISION, ENTITY_RECALL, TAG_ACCURACY
from smelt.evaluate.metrics.error_rates import CER, WER
from smelt.evaluate.metrics.label_sets import (
    F1_MACRO,
    F1_MICRO,
    PRECISION_OF_LABELS,
    RECALL_OF_LABELS,
    SUBSET_ACCURACY,
)
from smelt.evaluate.metrics.loss import LOSS
from smelt.evaluate.metrics.meteor import METEOR
from smelt.evaluate.metrics.metric import (
    Metric,
    MetricSettingValues,
    NumberSamples,
    Samples,
    TextSamples,
    WindowSamples,
)
from smelt.evaluate.metrics.perplexity import BITS_PER_BYTE, MASKED_ACCURACY, PERPLEXITY, RESPONSE_PERPLEXITY
from smelt.evaluate.metrics.ranking import MRR, NDCG
from smelt.evaluate.metrics.regression import MSE, PEARSON, SPEARMAN
from smelt.evaluate.metrics.retrieval import RETRIEVAL_RECALLS
from smelt.evaluate.metrics.rouge import ROUGE
from smelt.evaluate.metrics.ter import TER
from smelt.stage import Settings

# The order is that of a task's default metrics.
_ALL_METRICS: tuple[Metric[Any], ...] = (
    BLEU,
    CHRF,
    TER,
    *ROUGE,
    METEOR,
    BERTSCORE,
    WER,
    CER,
    TOKEN_F1,
    EXACT_MATCH,
    ACCURACY,
    F1_OF_CLASSES,
    PRECISION,
    RECALL,
    MATTHEWS,
    F1_MICRO,
    F1_MACRO,
    SUBSET_ACCURACY,
    *PRECISION_OF_LABELS,
    *RECALL_OF_LABELS,
    MEAN_AVERAGE_PRECISION,
    ENTITY_F1,
    ENTITY_PRECISION,
    ENTITY_RECALL,
    TAG_ACCURACY,
    *RETRIEVAL_RECALLS,
    CROSS_ENTROPY,
    PEARSON,
    SPEARMAN,
    MSE,
    MRR,
    NDCG,
    AGREEMENT,
    TOP1,
    RELATIVE_ERROR,
    ALLCLOSE,
    DETECTION_AP,
    PERPLEXITY,
    MASKED_ACCURACY,
    ACC,
    ACC_NORM,
    RESPONSE_PERPLEXITY,
    BITS_PER_BYTE,
    LOSS,
)
METRICS: dict[str, Metric[Any]] = {metric.name: metric for metric in _ALL_METRICS}


class CustomMetricSettings(Settings):
    """Settings of a user's custom metric, `package.module:function`."""

    greater_is_better: bool = Field(default=True, description="false: lower values are better")


# A user's own function, `package.module:function`: its range is not known.
_CUSTOM_METRIC: Metric[Any] = Metric(
    name="module:function",
    title="",
    unit="",
    description="a custom metric",
    kind="mean",
    limits=(-math.inf, math.inf),
    scale=1.0,
    digits=4,
    settings=CustomMetricSettings,
)


def find_metric(name: str) -> Metric[Any]:
    """Return the metric `name`, a name in `METRICS` or a user's own `module:function`.

    Raises:
        KeyError: no such metric.
    """
    base = base_metric(name)
    if is_custom_metric(base):
        return replace(_CUSTOM_METRIC, name=base, title=base)
    if base not in METRICS:
        raise KeyError(f"'{name}' is not a metric")
    base_definition = METRICS[base]
    return (
        base_definition
        if base == name
        else replace(base_definition, name=name, title=f"{base_definition.title} {name.removeprefix(base)}")
    )


def variant_name(metric: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a metric that is scored several times, `f1(positive)`; `f1` without settings."""
    return f"{metric}({', '.join(map(str, settings.values()))})" if settings else metric


def base_metric(name: str) -> str:
    """Return the metric of `variant_name`, `f1` for `f1(positive)`; other names are returned as they are."""
    base, bracket, _ = name.partition("(")
    variant_base = METRICS.get(base) if bracket and name.endswith(")") else None
    return base if variant_base is not None and variant_base.has_variants else name


def absent_metric_hint(name: str) -> str:
    """Return why a known metric is not offered, after a space; empty for any other name."""
    if "comet" not in name.lower():
        return ""
    return (
        " COMET is not offered: its checkpoints are pickles, which run code when they are opened, and smelt"
        " opens none. bertscore compares meanings, too."
    )


def require_known_metrics(metrics: Sequence[str], known: Sequence[str], option: str = "") -> None:
    """Require that all `metrics`, also names of `variant_name`, are among `known`.

    option: the command's option with these names, for messages.

    Raises:
        InputError: `unknown-metric`.
    """
    for name in metrics:
        if base_metric(name) not in known:
            hint = absent_metric_hint(name) or did_you_mean(name, known)
            raise InputError(
                f"{option}{' ' * bool(option)}'{name}' is not a metric that can be scored here. Available"
                f" metrics: {', '.join(known)}.{hint}",
                code="unknown-metric",
            )


def is_custom_metric(name: str) -> bool:
    """Return whether `name` is a user's custom metric, `package.module:function`."""
    return ":" in name and base_metric(name) == name  # a class may be called `a:b`


def takes_custom_metrics(task: str) -> bool:
    """Return whether custom metrics can be scored in `task`: each sample has an output, and is no vector."""
    return task_traits(task).output not in ("next-token", "masked-tokens", "embedding")


def metric_settings_type(name: str) -> type[Settings]:
    """Return the class of the settings of a metric; `Settings` for one that has none.

    Raises:
        KeyError: no such metric.
    """
    return find_metric(name).settings or Settings


def is_lower_better(name: str, settings: MetricSettingValues) -> bool:
    """Return whether lower values of the metric `name` are better; False for an unknown one."""
    if is_custom_metric(name):
        return not settings.get(name, {}).get("greater_is_better", True)
    definition = METRICS.get(base_metric(name))
    return definition is not None and not definition.higher_is_better


def fitting_metrics(*groups: str) -> tuple[str, ...]:
    """Return the metrics of tasks or problem types: by default scored ones first, of these the main one."""
    names: list[str] = []
    for part in ("main", "tasks", "optional"):
        names += [name for name, metric in METRICS.items() if {*groups} & {*getattr(metric, part)}]
    return tuple(dict.fromkeys(names))


def default_metrics(group: str) -> tuple[str, ...]:
    """Return the metrics of a task or problem type that are scored if a recipe lists none."""
    return tuple(name for name in fitting_metrics(group) if group not in METRICS[name].optional)


_PROBLEMS = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)
METRICS_BY_PROBLEM: dict[ProblemType, tuple[str, ...]] = {name: fitting_metrics(name) for name in _PROBLEMS}
"""The metrics that fit each problem type of a classifier; the first is the main one."""
DEFAULTS_BY_PROBLEM: dict[ProblemType, tuple[str, ...]] = {name: default_metrics(name) for name in _PROBLEMS}
CLASSIFIER_METRICS = tuple(
    dict.fromkeys(metric for metrics in METRICS_BY_PROBLEM.values() for metric in metrics)
)
_OTHER_TASKS = tuple(task for task in ALL_TASKS if task_traits(task).output != "labels")
METRICS_BY_TASK: dict[str, tuple[str, ...]] = {
    **{task: fitting_metrics(task) for task in _OTHER_TASKS},
    **dict.fromkeys(sorted(tasks_with(output="labels")), CLASSIFIER_METRICS),
}
"""The metrics that fit each task."""
# Of a recipe that names none. For a classifier they depend on the problem type, for sentence embedders on
# whether the samples have scores; both are known after reading model and data
# (smelt.pipeline.plan.untrained_checks, smelt.pipeline.plan.task_checks).
DEFAULT_METRICS: dict[str, tuple[str, ...]] = {
    **{task: default_metrics(task) for task in _OTHER_TASKS},
    **dict.fromkeys((*tasks_with(output="labels"), *tasks_with(output="embedding")), ()),
}


def metrics_of(samples: type[Samples]) -> tuple[str, ...]:
    """Return the metrics that score samples of this kind, in the order of `METRICS`."""
    return tuple(name for name, metric in METRICS.items() if samples in metric.samples)


TEXT_METRICS = metrics_of(TextSamples)
# of running text, whose windows depend on the tokenizer; n counts tokens
WINDOW_METRICS = tuple(name for name in metrics_of(WindowSamples) if METRICS[name].n_unit == "token")
AGREEMENT_METRIC, TOP1_METRIC = AGREEMENT.name, TOP1.name
EMBEDDING_METRICS = METRICS_BY_TASK["sentence-similarity"]
# of embedders, which need scored pairs
CORRELATION_METRICS = tuple(name for name in EMBEDDING_METRICS if NumberSamples in METRICS[name].samples)


def scores_agreement_alone(metrics: Sequence[str]) -> bool:
    """Return whether only agreement with the baseline's outputs is scored, which needs no references."""
    return tuple(metrics) == (AGREEMENT_METRIC,)
