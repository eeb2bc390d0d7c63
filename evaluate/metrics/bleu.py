"""BLEU (Papineni et al. 2002), as sacrebleu computes it (Post 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from smelt.core.errors import InputError, SettingError, did_you_mean
from smelt.data.bleu_tokenizer import BLEU_TOKENIZERS, bleu_tokenizer
from smelt.data.splits import Split
from smelt.evaluate.metrics.metric import Array, Rows, TextSamples
from smelt.evaluate.metrics.sacrebleu_metric import SACREBLEU_LIBRARIES, SacrebleuMetric
from smelt.stage import Settings


class BleuSettings(Settings):
    """Settings of `bleu`."""

    tokenize: str | None = Field(
        default=None, description="sacrebleu's tokenizer; default: by the language of the references"
    )

    @field_validator("tokenize")
    @classmethod
    def _check_tokenizer(cls, value: str | None) -> str | None:
        if value is not None and value not in BLEU_TOKENIZERS:
            hint = did_you_mean(value, BLEU_TOKENIZERS)
            raise SettingError(f"expected one of {', '.join(BLEU_TOKENIZERS)}.{hint}", code="wrong-value")
        return value


class Bleu(SacrebleuMetric):
    """Rows, K = 10: length of the prediction, of the nearest reference, 4 counts of matches, 4 of n-grams."""

    def scorer(self, samples: TextSamples, settings: Mapping[str, Any]) -> Any:
        """Return sacrebleu's BLEU, with a tokenizer for the language or the script of the references.

        Raises:
            InputError: the tokenizer of the settings cannot split the references.
        """
        from sacrebleu.metrics.bleu import BLEU

        texts = (text for references in samples.references for text in references)
        return BLEU(tokenize=bleu_tokenizer(texts, settings.get("tokenize"), samples.language))

    def segment_statistics(self, scorer: Any, prediction: str, references: Sequence[str]) -> list[float]:
        """Return the lengths and the counts of each order."""
        # `sentence_score` would warn once per segment that its order is not the effective one
        score = scorer.corpus_score([prediction], [[text] for text in references])
        return [score.sys_len, score.ref_len, *score.counts, *score.totals]

    def value(self, rows: Array, weights: Array) -> Array:
        """Return corpus BLEU with exponential smoothing."""
        return _combine(weights @ rows)

    def example_values(self, rows: Array) -> Array:
        """Return sacrebleu's sentence BLEU, with effective order: orders that the prediction has."""
        return _combine(rows, effective_order=True)

    def parts(self, rows: Rows) -> dict[str, float]:
        """Return the smoothed precisions in percent, the brevity penalty, and the lengths in tokens.

        The precisions are 0 if no word matches, as sacrebleu's.
        """
        sums = np.asarray(rows, dtype=np.float64).sum(0, keepdims=True)
        precisions = _precisions(sums)[0] * bool(sums[0, 2:6].any())
        return {f"precision_{order}": float(p) for order, p in enumerate(precisions, start=1)} | {
            "brevity_penalty": float(_brevity_penalty(sums)[0]),
            "hypothesis_length": float(sums[0, 0]),
            "reference_length": float(sums[0, 1]),
        }

    def describe(
        self, settings: Mapping[str, Any], references: Sequence[str] | None, language: str | None
    ) -> str:
        """Return the name with the tokenizer."""
        tokenize = settings.get("tokenize")
        if tokenize is None and references is not None:
            tokenize = bleu_tokenizer(references, language=language)
        return f"{self.name} ({tokenize or 'tokenizer by the references'})"

    def check(self, settings: Mapping[str, Any], base: Path, splits: Mapping[str, Split]) -> None:
        """Check that the tokenizer of the settings can split the references."""
        if "tokenize" not in settings:
            return
        for name, split in splits.items():
            try:
                bleu_tokenizer((t for e in split.examples for t in e.references), settings["tokenize"])
            except InputError as error:
                raise InputError(f"data.{name}: {error}", code=error.code, setting="tokenize") from error


def _combine(sums: Array, effective_order: bool = False) -> Array:
    """Return BLEU of summed statistics, [R, 10] -> [R], as sacrebleu's `BLEU.compute_bleu`.

    effective_order: whether orders without n-grams are left out of the mean; otherwise the score is then 0.
    """
    correct, total = sums[:, 2:6], sums[:, 6:10]
    orders = np.maximum(1, (total > 0).sum(1)) if effective_order else 4
    precisions = _precisions(sums)
    if effective_order:
        precisions = np.where(total > 0, precisions, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):  # no n-gram of an order: log 0, the score is 0
        score = _brevity_penalty(sums) * np.exp(np.log(precisions).sum(1) / orders)
    return np.where((correct.sum(1) == 0) | (sums[:, 0] == 0), 0.0, score)


def _precisions(sums: Array) -> Array:
    """Return the smoothed precision of each order in percent, [R, 10] -> [R, 4]; 0 without n-grams."""
    correct, total = sums[:, 2:6], sums[:, 6:10]
    none = (correct == 0) & (total > 0)
    matches = np.where(none, 0.5 ** np.cumsum(none, axis=1), correct)
    return np.where(total > 0, 100 * matches / np.maximum(1, total), 0.0)


def _brevity_penalty(sums: Array) -> Array:
    """Return the factor for predictions that are shorter than their references, [R, 10] -> [R]."""
    length, reference = sums[:, 0], sums[:, 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(length < reference, np.exp(1 - reference / length), 1.0)


BLEU = Bleu(
    name="bleu",
    title="BLEU",
    unit="BLEU",
    description="sacrebleu's, tokenized as the language needs",
    tasks=("translation",),
    optional=("summarization", "text-generation"),
    main=("translation",),
    kind="sum",
    libraries=SACREBLEU_LIBRARIES,
    settings=BleuSettings,
)
