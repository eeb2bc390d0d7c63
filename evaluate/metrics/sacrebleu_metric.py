"""Metrics of sacrebleu, which combine the statistics of its segments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from smelt.evaluate.metrics.metric import BOOTSTRAP_SEED, RESAMPLES, ExampleRows, TextMetric, TextSamples

SACREBLEU_LIBRARIES = ("sacrebleu", "mecab-python3", "mecab-ko")


class SacrebleuMetric(TextMetric, ABC):
    """A metric whose rows are the segment statistics of sacrebleu's `scorer`."""

    @abstractmethod
    def scorer(self, samples: TextSamples, settings: Mapping[str, Any]) -> Any:
        """Return sacrebleu's metric."""

    @abstractmethod
    def segment_statistics(self, scorer: Any, prediction: str, references: Sequence[str]) -> list[float]:
        """Return the statistics of one segment, [K], whose sums are those of the corpus."""

    def example_rows(self, samples: TextSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return sacrebleu's statistics per segment, and its signature."""
        scorer = self.scorer(samples, settings)
        rows = [
            self.segment_statistics(scorer, prediction, references)
            for prediction, references in zip(samples.predictions, samples.references, strict=True)
        ]
        # the signature reads these, which only `corpus_score` sets; -1: the number of references varies
        reference_counts = {len(references) for references in samples.references}
        scorer.num_refs = reference_counts.pop() if len(reference_counts) == 1 else -1
        scorer.n_bootstrap, scorer.seed = RESAMPLES, str(BOOTSTRAP_SEED)
        return ExampleRows(rows, str(scorer.get_signature()))
