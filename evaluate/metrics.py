"""The table of metrics: name, unit, direction, tasks, kind and settings of each.

Without numpy, since the recipe imports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, field_validator

from smelt.core.errors import SettingError, did_you_mean
from smelt.core.stage import Settings
from smelt.data.bleu_tokenizer import BLEU_TOKENIZERS
from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType
from smelt.data.splits import (
    CLASSIFICATION_TASKS,
    CUSTOM_TASK,
    SENTENCE_SIMILARITY,
    TEXT_GENERATION,
    TEXT_TO_TEXT_TASKS,
    Task,
)

MetricKind = Literal["proportion", "mean", "sum", "corpus"]
MetricSettingValues = Mapping[str, Mapping[str, Any]]
"""The settings of metrics that a recipe gives, by metric."""


class BleuSettings(Settings):
    """Settings of `bleu`."""

    tokenize: str | None = Field(
        default=None, description="sacrebleu's tokenizer; default: by the language of the references"
    )

    @field_validator("tokenize")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is not None and value not in BLEU_TOKENIZERS:
            hint = did_you_mean(value, BLEU_TOKENIZERS)
            raise SettingError(f"expected one of {', '.join(BLEU_TOKENIZERS)}.{hint}", code="wrong-value")
        return value


class ClassSettings(Settings):
    """Settings of `precision`, `recall` and `f1` of a classifier with one label.

    Such a metric may be scored several times; see `variant_name`.
    """

    label: str | int | None = Field(
        default=None, description="the only class that is scored; default: the mean over all classes"
    )


class BertScoreSettings(Settings):
    """Settings of `bertscore`."""

    model: str = Field(min_length=1, description="folder of an encoder with weights in safetensors")
    layer: int = Field(
        ge=1, le=1000, description="hidden states after this block; bert-score uses 17 of roberta-large"
    )


class CustomMetricSettings(Settings):
    """Settings of a user's custom metric, `package.module:function`."""

    greater_is_better: bool = Field(default=True, description="false: lower values are better")


@dataclass(frozen=True)
class Metric:
    """Properties of a metric.

    unit: of its value, in report.json and the tables. title: its name as papers write it.
    tasks: tasks, and problem types of classifiers, that it can be scored in; those of `optional` score it
        only where a recipe lists it, and in those of `main` it is the first one.
    kind: how the value follows from the rows of an example (`smelt.evaluate.significance.Statistics`):
        "proportion": a row is a prediction and its gold value, equal or not (Wilson, McNemar); "mean": the
        mean of the first column times `scale`; "sum": a function of sums, to which a row contributes a part;
        "corpus": another function of all rows.
    limits: the lowest and highest value, infinite where it has no limit.
    higher_is_better: its direction; where lower is better a gate's `max_drop` limits the rise.
    digits: decimal places in reports.
    libraries: distributions whose versions the value depends on.
    settings: the class of its settings in `score.quality`.
    """

    unit: str
    title: str
    tasks: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    main: tuple[str, ...] = ()
    kind: MetricKind = "corpus"
    limits: tuple[float, float] = (0.0, 100.0)
    scale: float = 100.0
    higher_is_better: bool = True
    digits: int = 2
    libraries: tuple[str, ...] = ()
    settings: type[Settings] | None = None


_TRANSLATION: Task = "translation"
_SUMMARIZATION: Task = "summarization"
_LANGUAGE_MODELING: Task = "language-modeling"
_SINGLE, _MULTI, _REGRESSION = (SINGLE_LABEL,), (MULTI_LABEL,), (REGRESSION,)
_CORRELATION_LIMITS = (-100.0, 100.0)
_ERROR_LIMITS, _PERPLEXITY_LIMITS = (0.0, math.inf), (1.0, math.inf)
_SACREBLEU = ("sacrebleu", "mecab-python3", "mecab-ko")


def _n_gram_metric(title: str, **more: Any) -> Metric:
    """Return BLEU or chrF."""
    tasks, optional = (_TRANSLATION,), (_SUMMARIZATION, TEXT_GENERATION)
    return Metric(title, title, tasks, optional, kind="sum", libraries=_SACREBLEU, **more)


def _rouge_metric(title: str, tasks: tuple[str, ...], optional: tuple[str, ...], **more: Any) -> Metric:
    return Metric(title, title, tasks, optional, kind="mean", libraries=("rouge-score",), **more)


def _class_metric(unit: str, title: str, **more: Any) -> Metric:
    """Return a metric of classifiers, computed as scikit-learn does."""
    return Metric(unit, title, libraries=("scikit-learn",), **more)


METRICS: dict[str, Metric] = {
    "bleu": _n_gram_metric("BLEU", main=(_TRANSLATION,), settings=BleuSettings),
    "chrf": _n_gram_metric("chrF"),
    "rouge1": _rouge_metric("ROUGE-1", (_TRANSLATION, _SUMMARIZATION), (TEXT_GENERATION,)),
    "rouge2": _rouge_metric("ROUGE-2", (_TRANSLATION, _SUMMARIZATION), (TEXT_GENERATION,)),
    "rougeL": _rouge_metric("ROUGE-L", (_TRANSLATION, _SUMMARIZATION, TEXT_GENERATION), ()),
    "rougeLsum": _rouge_metric("ROUGE-Lsum", (_SUMMARIZATION,), (TEXT_GENERATION,)),
    "meteor": Metric(
        "METEOR",
        "METEOR",
        optional=(_TRANSLATION, _SUMMARIZATION, TEXT_GENERATION),
        kind="mean",
        libraries=("nltk",),
    ),
    "bertscore": Metric(
        "BERTScore",
        "BERTScore",
        optional=(_TRANSLATION, _SUMMARIZATION, TEXT_GENERATION),
        kind="mean",
        limits=_CORRELATION_LIMITS,
        libraries=("transformers", "torch"),
        settings=BertScoreSettings,
    ),
    "token_f1": Metric("F1", "Token F1", (TEXT_GENERATION,), kind="mean"),
    "exact_match": Metric("%", "Exact match", (TEXT_GENERATION,), kind="proportion"),
    "accuracy": _class_metric("%", "Accuracy", tasks=_SINGLE, kind="proportion"),
    "f1": _class_metric("F1", "F1", tasks=_SINGLE, settings=ClassSettings),
    "precision": _class_metric("%", "Precision", optional=_SINGLE, settings=ClassSettings),
    "recall": _class_metric("%", "Recall", optional=_SINGLE, settings=ClassSettings),
    "matthews": _class_metric(
        "Matthews", "Matthews correlation", optional=_SINGLE, limits=_CORRELATION_LIMITS
    ),
    "f1_micro": _class_metric("F1", "F1 micro", tasks=_MULTI),
    "f1_macro": _class_metric("F1", "F1 macro", tasks=_MULTI),
    "subset_accuracy": _class_metric("%", "Subset accuracy", tasks=_MULTI, kind="proportion"),
    "precision_micro": _class_metric("%", "Precision micro", optional=_MULTI),
    "precision_macro": _class_metric("%", "Precision macro", optional=_MULTI),
    "recall_micro": _class_metric("%", "Recall micro", optional=_MULTI),
    "recall_macro": _class_metric("%", "Recall macro", optional=_MULTI),
    "cross_entropy": Metric(
        "nats",
        "Cross-entropy",
        optional=_SINGLE + _MULTI,
        kind="mean",
        limits=_ERROR_LIMITS,
        scale=1.0,
        higher_is_better=False,
        digits=4,
    ),
    "pearson": Metric(
        "Pearson", "Pearson", (REGRESSION, SENTENCE_SIMILARITY), main=_REGRESSION, limits=_CORRELATION_LIMITS
    ),
    "spearman": Metric(
        "Spearman",
        "Spearman",
        (REGRESSION, SENTENCE_SIMILARITY),
        main=(SENTENCE_SIMILARITY,),
        limits=_CORRELATION_LIMITS,
    ),
    "mse": Metric("MSE", "MSE", _REGRESSION, limits=_ERROR_LIMITS, higher_is_better=False),
    "agreement": Metric(
        "cosine",
        "Agreement",
        (SENTENCE_SIMILARITY, CUSTOM_TASK),
        optional=(_TRANSLATION, _SUMMARIZATION, TEXT_GENERATION, *_SINGLE, *_MULTI),
        kind="mean",
        limits=_CORRELATION_LIMITS,
    ),
    "top1": Metric("%", "Top-1 agreement", (CUSTOM_TASK,), kind="proportion"),
    "relative_error": Metric(
        "%", "Relative error", (CUSTOM_TASK,), kind="mean", limits=_ERROR_LIMITS, higher_is_better=False
    ),
    "perplexity": Metric(
        "perplexity", "Perplexity", (_LANGUAGE_MODELING,), limits=_PERPLEXITY_LIMITS, higher_is_better=False
    ),
    "acc": Metric("%", "Choice accuracy", optional=(TEXT_GENERATION,), kind="proportion"),
    "acc_norm": Metric("%", "Choice accuracy, by length", optional=(TEXT_GENERATION,), kind="proportion"),
    "response_perplexity": Metric(
        "perplexity",
        "Response perplexity",
        (TEXT_GENERATION,),
        limits=_PERPLEXITY_LIMITS,
        higher_is_better=False,
    ),
    "bits_per_byte": Metric(
        "bits/byte",
        "Bits per byte",
        (_LANGUAGE_MODELING,),
        limits=_ERROR_LIMITS,
        higher_is_better=False,
        digits=4,
    ),
}


# A user's own function, `package.module:function`: its range is not known.
_OWN_METRIC = Metric(
    "", "", kind="mean", limits=(-math.inf, math.inf), scale=1.0, digits=4, settings=CustomMetricSettings
)


def find_metric(name: str) -> Metric:
    """Return the properties of the metric `name`, a name in `METRICS` or a user's own `module:function`.

    Raises:
        KeyError: no such metric.
    """
    base = base_metric(name)
    if is_custom_metric(base):
        return replace(_OWN_METRIC, title=base)
    if base not in METRICS:
        raise KeyError(f"'{name}' is not a metric")
    known = METRICS[base]
    return known if base == name else replace(known, title=f"{known.title} {name.removeprefix(base)}")


def variant_name(metric: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a metric that is scored several times, `f1(positive)`; `f1` without settings."""
    return f"{metric}({', '.join(map(str, settings.values()))})" if settings else metric


def base_metric(name: str) -> str:
    """Return the metric of `variant_name`, `f1` for `f1(positive)`; other names are returned as they are."""
    base, bracket, _ = name.partition("(")
    found = METRICS.get(base) if bracket and name.endswith(")") else None
    return base if found is not None and found.settings is ClassSettings else name


def absent_metric_hint(name: str) -> str:
    """Return why a kncustom metric is not offered, after a space; empty for any other name."""
    if "comet" not in name.lower():
        return ""
    return (
        " COMET is not offered: its checkpoints are pickles, which run code when they are opened, and smelt"
        " opens none. bertscore compares meanings, too."
    )


def is_custom_metric(name: str) -> bool:
    """Return whether `name` is a user's custom metric, `package.module:function`."""
    return ":" in name and base_metric(name) == name  # a class may be called `a:b`


def takes_custom_metrics(task: str) -> bool:
    """Return whether custom metrics can be scored in `task`: outputs are texts, classes or numbers."""
    return task in TEXT_TO_TEXT_TASKS or task in CLASSIFICATION_TASKS


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
    return base_metric(name) in LOWER_IS_BETTER


def _fitting(*groups: str) -> tuple[str, ...]:
    """Return the metrics of tasks or problem types: by default scored ones first, of these the main one."""
    found: list[str] = []
    for part in ("main", "tasks", "optional"):
        found += [name for name, metric in METRICS.items() if {*groups} & {*getattr(metric, part)}]
    return tuple(dict.fromkeys(found))


def _defaults(group: str) -> tuple[str, ...]:
    return tuple(name for name in _fitting(group) if group not in METRICS[name].optional)


_PROBLEMS = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)
METRICS_BY_PROBLEM: dict[ProblemType, tuple[str, ...]] = {name: _fitting(name) for name in _PROBLEMS}
"""The metrics that fit each problem type of a classifier; the first is the main one."""
DEFAULTS_BY_PROBLEM: dict[ProblemType, tuple[str, ...]] = {name: _defaults(name) for name in _PROBLEMS}
CLASSIFIER_METRICS = tuple(
    dict.fromkeys(metric for metrics in METRICS_BY_PROBLEM.values() for metric in metrics)
)
_OTHER_TASKS: tuple[str, ...] = (
    *(_TRANSLATION, _SUMMARIZATION, _LANGUAGE_MODELING),
    *(TEXT_GENERATION, SENTENCE_SIMILARITY, CUSTOM_TASK),
)
METRICS_BY_TASK: dict[str, tuple[str, ...]] = {
    **{task: _fitting(task) for task in _OTHER_TASKS},
    **dict.fromkeys(sorted(CLASSIFICATION_TASKS), CLASSIFIER_METRICS),
}
"""The metrics that fit each task."""
# Of a recipe that names none. For a classifier they depend on the problem type, for sentence embedders on
# whether the samples have scores; both are known after reading model and data
# (smelt.pipeline.plan.untrained_checks, smelt.pipeline.plan.task_checks).
DEFAULT_METRICS: dict[str, tuple[str, ...]] = {
    **{task: _defaults(task) for task in _OTHER_TASKS},
    **dict.fromkeys((*CLASSIFICATION_TASKS, SENTENCE_SIMILARITY), ()),
}

# of running text, whose windows depend on the tokenizer
WINDOW_METRICS = METRICS_BY_TASK[_LANGUAGE_MODELING]
# of the reference response, given its prompt
RESPONSE_PERPLEXITY = "response_perplexity"
# of the likelihood of choices: the sum over their tokens, and that per character
CHOICE_METRICS = ("acc", "acc_norm")
LOWER_IS_BETTER = frozenset(name for name, metric in METRICS.items() if not metric.higher_is_better)
AGREEMENT_METRIC, TOP1_METRIC, RELATIVE_ERROR_METRIC = "agreement", "top1", "relative_error"
OUTPUT_METRICS = METRICS_BY_TASK[CUSTOM_TASK]
EMBEDDING_METRICS = METRICS_BY_TASK[SENTENCE_SIMILARITY]
CORRELATION_METRICS = ("spearman", "pearson")


def scores_agreement_alone(metrics: Sequence[str]) -> bool:
    """Return whether only agreement with the baseline's outputs is scored, which needs no references."""
    return tuple(metrics) == (AGREEMENT_METRIC,)


# of what a model writes, compared with the references
_TEXT_TASK_METRICS = {name for task in TEXT_TO_TEXT_TASKS for name in METRICS_BY_TASK[task]}
TEXT_METRICS = tuple(
    name
    for name in METRICS
    if name in _TEXT_TASK_METRICS - {RESPONSE_PERPLEXITY, AGREEMENT_METRIC, *CHOICE_METRICS}
)
