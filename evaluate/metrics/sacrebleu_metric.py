"""Metrics of sacrebleu, which combine the statistics of its segments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from smelt.evaluate.metrics.metric import BOOTSTRAP_SEED, RESAMPLES, ExampleRows, TextMetric, TextSamples

SACREBLEU_LIBRARIES = ("sacrebleu", "mecab-python3", "mecab-ko")


class SacrebleuMetric(TextMetric, ABC):
    """A metric whose rows are the segment statistics of sacrebleu's `scorer`."""

    @abstractmethod
    def scorer(self, samples: TextSamples, settings: Mapping[str, Any]) -> Any:
        """Return sacrebleu's metric."""

    def example_rows(self, samples: TextSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return sacrebleu's statistics per segment, and its signature."""
        scorer = self.scorer(samples, settings)
        # sacrebleu expects the references transposed, and None where an example has fewer
        most = max(map(len, samples.references))
        columns = [
            [texts[i] if i < len(texts) else None for texts in samples.references] for i in range(most)
        ]
        rows = scorer._extract_corpus_statistics(samples.predictions, columns)
        # the signature names the bootstrap only where these are set, as `corpus_score` does
        scorer.n_bootstrap, scorer.seed = RESAMPLES, str(BOOTSTRAP_SEED)
        return ExampleRows(rows, str(scorer.get_signature()))
