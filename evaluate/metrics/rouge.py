"""ROUGE (Lin 2004), by rouge-score with a tokenizer for every script."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from smelt.data.bleu_tokenizer import UNSPACED_PATTERN
from smelt.evaluate.metrics.metric import BOOTSTRAP_SIGNATURE, ExampleRows, Rows, TextMetric, TextSamples

# A sentence ends at a line end, or after a full stop, question or exclamation mark.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])\s*")
_NO_LETTER = re.compile(r"[\W_]")
_PARTS = ("precision", "recall")


class UnicodeTokenizer:
    """A tokenizer for rouge-score that keeps the letters of every script.

    Text is lowercased; words are runs of letters, digits and combining marks. Characters of scripts without
    spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan) are one word each.
    For English it equals rouge-score's own tokenizer, which drops all but a-z and 0-9, so that
    German "schön" would become "sch", "n".
    """

    def tokenize(self, text: str) -> list[str]:
        """Split `text` into words."""
        text = unicodedata.normalize("NFC", text).lower()
        text = _NO_LETTER.sub(lambda hit: hit[0] if _is_mark(hit[0]) else " ", text)
        return re.sub(UNSPACED_PATTERN, r" \g<0> ", text).split()


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


class Rouge(TextMetric):
    """Rows, K = 3: F1, precision, recall, 0..1."""

    def example_rows(self, samples: TextSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return F1 per example, the best over its references, and that one's precision and recall."""
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer([self.name], tokenizer=UnicodeTokenizer())
        score: Callable[[Sequence[str], str], dict[str, Any]] = scorer.score_multi
        rows: Rows = []
        for texts, prediction in zip(samples.references, samples.predictions, strict=True):
            rouge_scores = score([_sentence_lines(text) for text in texts], _sentence_lines(prediction))
            score_of_best = rouge_scores[self.name]
            rows.append([float(getattr(score_of_best, name)) for name in ("fmeasure", *_PARTS)])
        return ExampleRows(rows, self._signature(samples.references))

    def parts(self, rows: Rows) -> dict[str, float]:
        """Return the means of precision and recall, in percent."""
        means = 100 * np.asarray(rows, dtype=np.float64).mean(0)
        return dict(zip(_PARTS, map(float, means[1:]), strict=True))

    def _signature(self, references: Sequence[Sequence[str]]) -> str:
        counts = {len(texts) for texts in references}
        num_references = str(counts.pop()) if len(counts) == 1 else "var"
        settings = "case:lower|tok:smelt-unicode-words-2|stem:no|refs:best F1|average:mean"
        if self.name == "rougeLsum":
            settings += "|sentences:line ends and .!?"
        library = f"version:rouge-score {version('rouge-score')}"
        return f"nrefs:{num_references}|{settings}|{BOOTSTRAP_SIGNATURE}|{library}"


def _sentence_lines(text: str) -> str:
    """Return `text` with one sentence per line, as ROUGE-Lsum reads it; other ROUGE ignore line ends."""
    return _SENTENCE_END.sub("\n", text)


def _rouge(name: str, of: str, tasks: tuple[str, ...], optional: tuple[str, ...] = ()) -> Rouge:
    title = f"ROUGE-{name.removeprefix('rouge')}"
    return Rouge(
        name=name,
        title=title,
        unit=title,
        description=f"F1 of {of} with the best reference",
        tasks=tasks,
        optional=optional,
        kind="mean",
        libraries=("rouge-score",),
    )


ROUGE = (
    _rouge("rouge1", "words", ("translation", "summarization"), ("text-generation",)),
    _rouge("rouge2", "pairs of words", ("translation", "summarization"), ("text-generation",)),
    _rouge("rougeL", "the longest common subsequence", ("translation", "summarization", "text-generation")),
    _rouge("rougeLsum", "rougeL's subsequences by sentence", ("summarization",), ("text-generation",)),
)
