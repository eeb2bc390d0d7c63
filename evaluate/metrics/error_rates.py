"""Word and character error rate of transcripts, by jiwer: edits per word or character of the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from smelt.core.errors import MissingDependencyError
from smelt.data.splits import Split
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    Array,
    ExampleRows,
    Rows,
    TextMetric,
    TextSamples,
)
from smelt.stage import Settings


class ErrorRateSettings(Settings):
    """Settings of `wer` and `cer`."""

    normalizer: Literal["none", "basic", "english"] = Field(
        default="none",
        description="how texts are changed before they are compared: none: spaces only; basic, english: as"
        " Whisper's normalizers do (lower case, no punctuation; english also writes numbers as digits and"
        " contractions in full)",
    )


def _normalizer(name: str) -> Callable[[str], str]:
    if name == "none":
        return str
    from transformers.models.whisper import english_normalizer

    # with the spellings of a checkpoint's normalizer.json the English one would also replace British ones
    english, basic = english_normalizer.EnglishTextNormalizer({}), english_normalizer.BasicTextNormalizer()
    normalize: Callable[[str], str] = english if name == "english" else basic
    return normalize


def require_jiwer() -> Any:
    """Return the library.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import jiwer
    except ImportError as error:
        raise MissingDependencyError(
            "jiwer, which computes wer and cer, is not installed. Run: pip install 'smelt[speech]'",
            code="not-installed",
        ) from error
    return jiwer


@dataclass(frozen=True, kw_only=True)
class ErrorRate(TextMetric):
    """Rows, K = 2: edits to the nearest reference, words or characters of that reference."""

    counts: Literal["words", "characters"] = "words"

    def example_rows(self, samples: TextSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return jiwer's counts; of several references those with the lowest rate.

        Raises:
            MissingDependencyError: as `require_jiwer`.
        """
        jiwer, name = require_jiwer(), ErrorRateSettings.model_validate(settings).normalizer
        normalize = _normalizer(name)
        compare = jiwer.process_words if self.counts == "words" else jiwer.process_characters

        def edits(prediction: str, reference: str) -> tuple[int, int]:
            result = compare([normalize(reference)], [normalize(prediction)])
            expected = result.hits + result.substitutions + result.deletions
            return result.substitutions + result.deletions + result.insertions, expected

        rows: Rows = []
        for text, references in zip(samples.predictions, samples.references, strict=True):
            rows.append([*min([edits(text, reference) for reference in references], key=_rate)])
        signature = f"normalizer:{name}|refs:best|{BOOTSTRAP_SIGNATURE}|version:jiwer {version('jiwer')}"
        return ExampleRows(rows, signature)

    def value(self, rows: Array, weights: Array) -> Array:
        """Return 100 times edits / length, [R]."""
        return _rates(weights @ rows)

    def example_values(self, rows: Array) -> Array:
        """Return the rate of each example."""
        return _rates(rows)

    def chance_level(self, rows: Rows) -> float:
        """Return the value of empty texts: every word is deleted."""
        return 100.0

    def check(self, settings: Mapping[str, Any], base: Path, splits: Mapping[str, Split]) -> None:
        """Check that jiwer is installed."""
        require_jiwer()


def _rate(counts: tuple[int, int]) -> float:
    edits, length = counts
    return edits / length if length else math.inf * edits if edits else 0.0


def _rates(sums: Array) -> Array:
    edits, length = sums.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(length > 0, 100 * (edits / length), np.where(edits > 0, 100.0, 0.0))


WER = ErrorRate(
    name="wer",
    title="WER",
    unit="WER",
    description="jiwer's word error rate, edits per 100 words of the reference",
    tasks=("speech-recognition",),
    kind="sum",
    limits=(0.0, math.inf),
    higher_is_better=False,
    libraries=("jiwer",),
    settings=ErrorRateSettings,
)
CER = ErrorRate(
    name="cer",
    title="CER",
    unit="CER",
    description="jiwer's character error rate, edits per 100 characters of the reference",
    tasks=("speech-recognition",),
    kind="sum",
    limits=(0.0, math.inf),
    higher_is_better=False,
    libraries=("jiwer",),
    settings=ErrorRateSettings,
    counts="characters",
)
