"""METEOR (Banerjee and Lavie 2005), by nltk: also matches stems, and synonyms in English WordNet."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smelt.core.errors import MissingDependencyError
from smelt.data.splits import Split
from smelt.evaluate.metrics.metric import BOOTSTRAP_SIGNATURE, ExampleRows, Rows, TextMetric, TextSamples


def require_wordnet() -> None:
    """Require the data that METEOR's synonyms come from.

    Raises:
        MissingDependencyError: `missing-wordnet`.
    """
    import nltk

    for name in ("corpora/wordnet.zip", "corpora/wordnet"):
        try:
            nltk.data.find(name)
        except LookupError:
            continue
        return
    raise MissingDependencyError(
        "meteor needs WordNet in nltk's data folder, which is not there. Install it with `python -m"
        " nltk.downloader wordnet`, or set NLTK_DATA to the folder that has corpora/wordnet.",
        code="missing-wordnet",
    )


def sentence_tokenizer() -> tuple[Any, str]:
    """Return nltk's Punkt, which splits a text into sentences, and the name of its parameters.

    They are `english`, those of `word_tokenize`, if nltk's data folder has punkt_tab, else `untrained`, which
    know no abbreviations.
    """
    from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTokenizer

    try:
        return PunktTokenizer("english"), "english"
    except LookupError:
        return PunktSentenceTokenizer(), "untrained"


class Meteor(TextMetric):
    """Rows, K = 1: METEOR, 0..1."""

    def example_rows(self, samples: TextSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return METEOR of each prediction, the maximum over its references.

        Computed by nltk with its defaults (alpha 0.9, beta 3, gamma 0.5) on words as `word_tokenize` of nltk
        splits them: first into sentences, since the Treebank tokenizer separates a full stop only at the end
        of its input.

        Raises:
            MissingDependencyError: as `require_wordnet`.
        """
        require_wordnet()
        from nltk.tokenize import NLTKWordTokenizer
        from nltk.translate.meteor_score import meteor_score

        (sentences, parameters), tokenizer = sentence_tokenizer(), NLTKWordTokenizer()

        def words(text: str) -> list[str]:
            return [token for sentence in sentences.tokenize(text) for token in tokenizer.tokenize(sentence)]

        rows: Rows = [
            [float(meteor_score([words(text) for text in texts], words(prediction)))]
            for prediction, texts in zip(samples.predictions, samples.references, strict=True)
        ]
        tokenizer_signature = f"tok:nltk|sentences:punkt {parameters}|refs:best"
        library = f"version:nltk {version('nltk')}"
        return ExampleRows(
            rows, f"alpha:0.9|beta:3|gamma:0.5|{tokenizer_signature}|{BOOTSTRAP_SIGNATURE}|{library}"
        )

    def check(self, settings: Mapping[str, Any], base: Path, splits: Mapping[str, Split]) -> None:
        """Check that WordNet is installed."""
        require_wordnet()

    def fingerprint(self, settings: Mapping[str, Any], base: Path) -> str:
        """Return the parameters of the sentence tokenizer."""
        return sentence_tokenizer()[1]


METEOR = Meteor(
    name="meteor",
    title="METEOR",
    unit="METEOR",
    description="nltk's, best reference",
    optional=("translation", "summarization", "text-generation"),
    kind="mean",
    libraries=("nltk",),
    reads_file=True,
)
