"""Exact match and token F1 of answers, as SQuAD v1.1's evaluation script (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from smelt.evaluate.metrics.metric import BOOTSTRAP_SIGNATURE, ExampleRows, Rows, TextMetric, TextSamples

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def normalize_answer(text: str) -> str:
    """Return `text` in lower case, without ASCII punctuation and English articles, with single spaces."""
    cleaned = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", cleaned).split())


class ExactMatch(TextMetric):
    """Rows, K = 2: 1 where the response equals a reference, then 1."""

    def example_rows(self, samples: TextSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return whether each response equals a reference."""
        rows: Rows = []
        for text, references in zip(samples.predictions, samples.references, strict=True):
            answer = normalize_answer(text)
            rows.append(
                [int(any(answer == normalize_answer(reference_text) for reference_text in references)), 1]
            )
        return ExampleRows(rows, "norm:squad v1.1|refs:best|ci:wilson")


class TokenF1(TextMetric):
    """Rows, K = 1: F1, 0..1."""

    def example_rows(self, samples: TextSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the F1 of the words of each response, with the best reference."""
        pairs = zip(samples.predictions, samples.references, strict=True)
        rows: Rows = [
            [max(_token_f1(text, reference_text) for reference_text in references)]
            for text, references in pairs
        ]
        return ExampleRows(rows, f"norm:squad v1.1|refs:best|{BOOTSTRAP_SIGNATURE}")


def _token_f1(prediction: str, reference: str) -> float:
    tokens, gold = normalize_answer(prediction).split(), normalize_answer(reference).split()
    num_common = sum((Counter(tokens) & Counter(gold)).values())
    return 2 * num_common / (len(tokens) + len(gold)) if num_common else 0.0


TOKEN_F1 = TokenF1(
    name="token_f1",
    title="Token F1",
    unit="F1",
    description="F1 of the words with the best reference, normalized as `exact_match`",
    tasks=("text-generation",),
    kind="mean",
)
EXACT_MATCH = ExactMatch(
    name="exact_match",
    title="Exact match",
    unit="%",
    description="responses equal to a reference, after SQuAD v1.1's normalization (lower case, no"
    " punctuation, no English articles)",
    tasks=("text-generation",),
    kind="proportion",
)
