"""The metrics: unit, name and direction of each. Without numpy, since the recipe imports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """Properties of a metric.

    unit: of its value, in report.json and the tables. title: its name as papers write it.
    higher_is_better: its direction; for metrics where lower is better a gate's `max_drop` limits the rise.
    """

    unit: str
    title: str
    higher_is_better: bool = True


METRICS: dict[str, Metric] = {
    "bleu": Metric("BLEU", "BLEU"),
    "chrf": Metric("chrF", "chrF"),
    "rouge1": Metric("ROUGE-1", "ROUGE-1"),
    "rouge2": Metric("ROUGE-2", "ROUGE-2"),
    "rougeL": Metric("ROUGE-L", "ROUGE-L"),
    "rougeLsum": Metric("ROUGE-Lsum", "ROUGE-Lsum"),
    "exact_match": Metric("%", "Exact match"),
    "token_f1": Metric("F1", "Token F1"),
    "accuracy": Metric("%", "Accuracy"),
    "f1": Metric("F1", "F1"),
    "f1_micro": Metric("F1", "F1 micro"),
    "f1_macro": Metric("F1", "F1 macro"),
    "subset_accuracy": Metric("%", "Subset accuracy"),
    "pearson": Metric("Pearson", "Pearson"),
    "spearman": Metric("Spearman", "Spearman"),
    "mse": Metric("MSE", "MSE", higher_is_better=False),
    "agreement": Metric("cosine", "Agreement"),
    "top1": Metric("%", "Top-1 agreement"),
    "relative_error": Metric("%", "Relative error", higher_is_better=False),
    "perplexity": Metric("perplexity", "Perplexity", higher_is_better=False),
    "response_perplexity": Metric("perplexity", "Response perplexity", higher_is_better=False),
    "bits_per_byte": Metric("bits/byte", "Bits per byte", higher_is_better=False),
}
# of running text, whose windows depend on the tokenizer
WINDOW_METRICS = ("perplexity", "bits_per_byte")
# of the reference response, given its prompt
RESPONSE_PERPLEXITY = "response_perplexity"
LOWER_IS_BETTER = frozenset(name for name, metric in METRICS.items() if not metric.higher_is_better)
AGREEMENT_METRIC, TOP1_METRIC, RELATIVE_ERROR_METRIC = "agreement", "top1", "relative_error"
OUTPUT_METRICS = (AGREEMENT_METRIC, TOP1_METRIC, RELATIVE_ERROR_METRIC)
CORRELATION_METRICS = ("spearman", "pearson")
EMBEDDING_METRICS = (*CORRELATION_METRICS, AGREEMENT_METRIC)


def scores_agreement_alone(metrics: Sequence[str]) -> bool:
    """Return whether only agreement with the baseline's outputs is scored, which needs no references."""
    return tuple(metrics) == (AGREEMENT_METRIC,)
