"""MRR and nDCG of the passages of a query, ordered by the scores of a cross-encoder.

The samples with the same first text are the passages of one query. Queries without a relevant passage are
left out: no order of theirs is better than another. Passages with equal scores have a random order, of which
both metrics are the expected value: a model that gives all passages one score has no advantage from the order
of the file.

Shapes: q = queries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, log2
from pathlib import Path
from typing import Any

from pydantic import Field

from smelt.core.errors import InputError
from smelt.core.messages import Message, error_message
from smelt.data.labels import REGRESSION, SINGLE_LABEL
from smelt.data.splits import Split
from smelt.evaluate.metrics.metric import BOOTSTRAP_SIGNATURE, Array, ExampleRows, Metric, Samples
from smelt.stage import Settings


@dataclass(frozen=True)
class RankedSamples(Samples):
    """n scored passages: the query of each, its score, and its relevance, 0 if it is not relevant."""

    queries: Sequence[str]
    scores: Sequence[float]
    relevance: Sequence[float]


class RankSettings(Settings):
    """Settings of `mrr` and `ndcg`."""

    k: int = Field(default=10, ge=1, description="how many passages of a query count, the first ones")


Ranking = list[list[float]]
"""The relevance of the passages of a query, best score first; those with one score are one list."""


class RankMetric(Metric[RankedSamples], ABC):
    """Rows, K = 1: the value of each query, 0 to 1."""

    samples = (RankedSamples,)
    n_unit = "query"

    def example_rows(self, samples: RankedSamples, settings: Mapping[str, Any]) -> ExampleRows | None:
        """Return the value of each query; chance: of equal scores. None without a relevant passage."""
        k, rankings = int(settings.get("k", RankSettings().k)), rankings_by_query(samples)
        if not rankings:
            return None
        rows = [[self.query_value(ranking, k)] for ranking in rankings]
        equal = [self.query_value([_all_passages(ranking)], k) for ranking in rankings]
        signature = f"k:{k}|ties:expected|queries:with relevant|{self.gain()}{BOOTSTRAP_SIGNATURE}"
        return ExampleRows([*rows], signature, chance=self.scale * sum(equal) / len(equal))

    def gain(self) -> str:
        """Return what the signature says of the gain."""
        return ""

    @abstractmethod
    def query_value(self, ranking: Ranking, k: int) -> float:
        """Return the value of one query, 0 to 1."""

    def example_values(self, rows: Array) -> Array | None:
        """Return None: a row is a query, not a sample."""
        return None

    def check(self, settings: Mapping[str, Any], base: Path, splits: Mapping[str, Split]) -> None:
        """Check that the samples are pairs.

        Raises:
            InputError: `no-pairs`.
        """
        for name, split in splits.items():
            single = next((e for e in split.examples if e.text_pair is None), None)
            if single is not None:
                raise InputError(
                    f"{self.name}: the sample {single.text[:40]!r} of {split.origin} ({name}) is no pair of a"
                    " query and a passage. Set data: {columns: {text: query, text_pair: passage}}, or remove"
                    " the metric.",
                    code="no-pairs",
                )


class ReciprocalRank(RankMetric):
    """The mean of 1 / rank of the first relevant passage, 0 if it is not among the first k.

    Source: Voorhees 1999, TREC-8 question answering track; of MS MARCO with k = 10.
    """

    def query_value(self, ranking: Ranking, k: int) -> float:
        """Return the expected reciprocal rank: [positions of the first of r relevant ones among m equals]."""
        start = 0
        for tied in ranking:
            count, relevant = len(tied), sum(value > 0 for value in tied)
            if relevant:
                # the first relevant one is at position j if the j - 1 before it are not relevant
                orders = comb(count, relevant)
                return sum(
                    comb(count - j, relevant - 1) / orders / (start + j)
                    for j in range(1, count - relevant + 2)
                    if start + j <= k
                )
            start += count
        return 0.0


class DiscountedGain(RankMetric):
    """The discounted cumulative gain of the first k passages, divided by that of the best order.

    The gain is the relevance, the discount log2(rank + 1). Source: Järvelin and Kekäläinen 2002, ACM TOIS
    20(4); with ties as McSherry and Najork 2008, ECIR, and scikit-learn's ndcg_score.
    """

    def gain(self) -> str:
        """Return what the signature says of the gain."""
        return "gain:linear|"

    def query_value(self, ranking: Ranking, k: int) -> float:
        """Return the expected gain over the best one."""
        best = sorted(_all_passages(ranking), reverse=True)
        return _discounted(ranking, k) / _discounted([[value] for value in best], k)


def _discounted(ranking: Ranking, k: int) -> float:
    """Return the sum of relevance / log2(rank + 1), of equals with their mean relevance."""
    total, rank = 0.0, 0
    for tied in ranking:
        mean = sum(tied) / len(tied)
        for _ in tied:
            rank += 1
            total += mean / log2(rank + 1) if rank <= k else 0.0
    return total


def _all_passages(ranking: Ranking) -> list[float]:
    return [value for tied in ranking for value in tied]


def rankings_by_query(samples: RankedSamples) -> list[Ranking]:
    """Return the ranking of each query that has a relevant passage, in the order of the samples."""
    by_query: dict[str, dict[float, list[float]]] = {}
    for query, score, relevance in zip(samples.queries, samples.scores, samples.relevance, strict=True):
        by_query.setdefault(query, {}).setdefault(score, []).append(relevance)
    rankings = [
        [by_score[score] for score in sorted(by_score, reverse=True)] for by_score in by_query.values()
    ]
    return [ranking for ranking in rankings if any(value > 0 for tied in ranking for value in tied)]


def several_outputs_error(metric: str, num_outputs: int) -> Message:
    """Return the error that passages cannot be ordered by a model of several numbers."""
    text = (
        f"{metric}: passages are ordered by one number, but the model has {num_outputs} outputs."
        " Remove the metric."
    )
    return error_message("does-not-fit-labels", text)


_CLASSIFIERS = (SINGLE_LABEL, REGRESSION)
MRR = ReciprocalRank(
    name="mrr",
    title="MRR",
    unit="MRR",
    description="mean reciprocal rank of a query's first relevant passage, times 100; k: 10",
    optional=_CLASSIFIERS,
    kind="mean",
    settings=RankSettings,
)
NDCG = DiscountedGain(
    name="ndcg",
    title="nDCG",
    unit="nDCG",
    description="normalized discounted cumulative gain of a query's passages, times 100; k: 10",
    optional=_CLASSIFIERS,
    kind="mean",
    settings=RankSettings,
)
