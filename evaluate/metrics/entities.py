"""Precision, recall and F1 of entities, and the accuracy of tags, for token classification.

An entity is right if its words and its type are, as in CoNLL-2003 (Tjong Kim Sang and De Meulder 2003), the
script conlleval and seqeval's default mode, which read the tags leniently (`smelt.data.tags`). seqeval is the
reference in the tests. It is no dependency, because it returns a value of all sentences, and not what each
sentence contributes.

Shapes: n = sentences, R = resamples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from smelt.data.tags import Span, TagScheme, read_spans
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    Array,
    ExampleRows,
    Metric,
    Rows,
    Samples,
    safe_ratio,
)


@dataclass(frozen=True)
class TagSamples(Samples):
    """The predicted and gold tags of the words of n sentences."""

    predicted: Sequence[Sequence[str]]
    gold: Sequence[Sequence[str]]
    scheme: TagScheme = TagScheme()  # noqa: RUF009 - immutable


@dataclass(frozen=True)
class EntityCounts:
    """Of each type of entity, int64 [types]: how often it was found rightly, was predicted, and occurs."""

    types: list[str]
    hits: NDArray[np.int64]
    predicted: NDArray[np.int64]
    present: NDArray[np.int64]


def count_entities(samples: TagSamples) -> EntityCounts:
    """Return the counts by type, the types sorted."""
    counts: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
    for predicted_spans, gold in _span_pairs(samples):
        for counter, spans in zip(counts, (predicted_spans & gold, predicted_spans, gold), strict=True):
            counter.update(span.label for span in spans)
    types = sorted(counts[1] | counts[2])
    hits, predicted, present = (np.array([c[name] for name in types], dtype=np.int64) for c in counts)
    return EntityCounts(types, hits, predicted, present)


def _span_pairs(samples: TagSamples) -> list[tuple[set[Span], set[Span]]]:
    """Return the predicted and the gold entities of each sentence."""
    return [
        (set(read_spans(predicted, samples.scheme)), set(read_spans(gold, samples.scheme)))
        for predicted, gold in zip(samples.predicted, samples.gold, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class EntityMetric(Metric[TagSamples]):
    """Rows, K = 3: the entities of a sentence that are found rightly, that are predicted, and that it has."""

    samples = (TagSamples,)
    n_unit = "sentence"
    statistic: Literal["f1", "precision", "recall"]

    def example_rows(self, samples: TagSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the numbers of entities of each sentence."""
        pairs = _span_pairs(samples)
        rows: Rows = [[len(predicted & gold), len(predicted), len(gold)] for predicted, gold in pairs]
        return ExampleRows(rows, f"average:micro|scheme:conlleval|empty:0|{BOOTSTRAP_SIGNATURE}")

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the statistic of all entities together: [R]."""
        return self._combine(weights @ rows)

    def example_values(self, rows: Array) -> Array:
        """Return the statistic of each sentence, 100 where it neither has nor gets an entity."""
        return np.where(rows[:, 1:].sum(axis=1) > 0, self._combine(rows), 100.0)

    def changed_values(self, rows: Array) -> Array:
        """Return the values after one entity more is right, is wrong, or is missing."""
        changes = np.array([[1, 0, 0], [0, 1, 0], [-1, -1, 0], [0, -1, 0]])
        sums = rows.sum(axis=0) + changes
        hits, predicted, present = sums.T
        return self._combine(sums[(hits >= 0) & (predicted >= hits) & (present >= hits)])

    def chance_level(self, rows: Rows) -> float:
        """Return the value of a model that finds no entity."""
        return 0.0

    def _combine(self, sums: Array) -> Array:
        hits, predicted, present = sums.T
        denominators = {"f1": (predicted + present) / 2, "precision": predicted, "recall": present}
        return np.asarray(safe_ratio(hits, denominators[self.statistic]))


@dataclass(frozen=True, kw_only=True)
class TagAccuracy(Metric[TagSamples]):
    """Rows, K = 2: the words of a sentence with the right tag, and all of its words."""

    samples = (TagSamples,)
    n_unit = "sentence"

    def example_rows(self, samples: TagSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the numbers of words of each sentence; chance: the most frequent tag for each word."""
        pairs = list(zip(samples.predicted, samples.gold, strict=True))
        rows: Rows = [[sum(a == b for a, b in zip(*pair, strict=True)), len(pair[1])] for pair in pairs]
        frequencies = Counter(tag for _, gold in pairs for tag in gold)
        chance = 100 * max(frequencies.values()) / frequencies.total()
        return ExampleRows(rows, f"words:all|{BOOTSTRAP_SIGNATURE}", chance=chance)

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the share of words with the right tag: [R]."""
        right, words = (weights @ rows).T
        return np.asarray(safe_ratio(right, words))

    def example_values(self, rows: Array) -> Array:
        """Return the share of each sentence."""
        return np.asarray(safe_ratio(rows[:, 0], rows[:, 1]))


_TASK = ("token-classification",)
_ALL = "of entities with the right words and type, of all types together, as seqeval's; 0 where undefined"
ENTITY_F1 = EntityMetric(
    name="entity_f1",
    title="Entity F1",
    unit="F1",
    description=f"F1 {_ALL}",
    main=_TASK,
    tasks=_TASK,
    statistic="f1",
)
ENTITY_PRECISION = EntityMetric(
    name="entity_precision",
    title="Entity precision",
    unit="%",
    description=f"precision {_ALL}",
    tasks=_TASK,
    statistic="precision",
)
ENTITY_RECALL = EntityMetric(
    name="entity_recall",
    title="Entity recall",
    unit="%",
    description=f"recall {_ALL}",
    tasks=_TASK,
    statistic="recall",
)
TAG_ACCURACY = TagAccuracy(
    name="tag_accuracy",
    title="Tag accuracy",
    unit="%",
    description="words with the right tag, `O` included",
    tasks=_TASK,
    kind="sum",
)
