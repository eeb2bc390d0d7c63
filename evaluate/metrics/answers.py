"""Exact match and token F1 of answers, by the rules of SQuAD's evaluation scripts.

Version 1.1 is Rajpurkar et al. 2016. Version 2.0 (Rajpurkar et al. 2018) also scores unanswerable questions,
whose right answer is the empty text; it is used if there are any.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from smelt.evaluate.metrics.metric import BOOTSTRAP_SIGNATURE, ExampleRows, Rows, TextMetric, TextSamples

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def normalize_answer(text: str) -> str:
    """Return `text` in lower case, without ASCII punctuation and English articles, with single spaces."""
    cleaned = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", cleaned).split())


def _has_unanswerable(samples: TextSamples) -> bool:
    return any(not any(references) for references in samples.references)


def _gold_answers(references: Sequence[str], is_version_2: bool) -> Sequence[str]:
    """Return the references; those of version 2.0 without any that have no words, or the empty text."""
    if not is_version_2:
        return references
    return [text for text in references if normalize_answer(text)] or [""]


def _version(is_version_2: bool) -> str:
    return f"norm:squad v{'2.0' if is_version_2 else '1.1'}|refs:best"


def _chance(samples: TextSamples) -> float:
    """Return the value of empty texts: the share of unanswerable questions."""
    unanswerable = sum(not any(references) for references in samples.references)
    return 100 * unanswerable / len(samples.references)


class ExactMatch(TextMetric):
    """Rows, K = 2: 1 where the response equals a reference, then 1."""

    def example_rows(self, samples: TextSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return whether each response equals a reference."""
        rows: Rows = []
        is_version_2 = _has_unanswerable(samples)
        for text, references in zip(samples.predictions, samples.references, strict=True):
            answer, gold = normalize_answer(text), _gold_answers(references, is_version_2)
            rows.append([int(any(answer == normalize_answer(reference_text) for reference_text in gold)), 1])
        return ExampleRows(rows, f"{_version(is_version_2)}|ci:wilson", chance=_chance(samples))


class TokenF1(TextMetric):
    """Rows, K = 1: F1, 0..1."""

    def example_rows(self, samples: TextSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the F1 of the words of each response, with the best reference."""
        is_version_2 = _has_unanswerable(samples)
        rows: Rows = [
            [max(_token_f1(text, gold, is_version_2) for gold in _gold_answers(references, is_version_2))]
            for text, references in zip(samples.predictions, samples.references, strict=True)
        ]
        signature = f"{_version(is_version_2)}|{BOOTSTRAP_SIGNATURE}"
        return ExampleRows(rows, signature, chance=_chance(samples))


def _token_f1(prediction: str, reference: str, is_version_2: bool) -> float:
    tokens, gold = normalize_answer(prediction).split(), normalize_answer(reference).split()
    if is_version_2 and not (tokens and gold):
        return float(tokens == gold)
    num_common = sum((Counter(tokens) & Counter(gold)).values())
    return 2 * num_common / (len(tokens) + len(gold)) if num_common else 0.0


TOKEN_F1 = TokenF1(
    name="token_f1",
    title="Token F1",
    unit="F1",
    description="F1 of the words with the best reference, normalized as `exact_match`",
    tasks=("text-generation", "question-answering"),
    main=("question-answering",),
    kind="mean",
)
EXACT_MATCH = ExactMatch(
    name="exact_match",
    title="Exact match",
    unit="%",
    description="responses equal to a reference, after SQuAD's normalization (lower case, no punctuation, no"
    " English articles); an unanswerable question has the empty answer, as in SQuAD 2.0",
    tasks=("text-generation", "question-answering"),
    kind="proportion",
)
