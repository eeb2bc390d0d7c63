"""Tokens of a recipe's samples, estimated from their characters and the tokens of a few of them.

The tokenizer's files are read with the libraries tokenizers and sentencepiece, which load in milliseconds.
Without such a file a token has four bytes, as in English text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import rust_panics_as_errors
from smelt.data.splits import (
    CUSTOM_TASK,
    ENCODER_DECODER_TASKS,
    IMAGE_CLASSIFICATION,
    SENTENCE_SIMILARITY,
    TEXT_GENERATION,
    Example,
    Split,
    Task,
)
from smelt.models.costs import SampleLengths
from smelt.models.text_rules import DEFAULT_WINDOW_LENGTH, position_limit

_BYTES_PER_TOKEN = 4.0
_MAX_SAMPLES = 20_000  # that are measured
_TOKENIZED, _CHARACTERS = 64, 2000  # texts that are tokenized, and characters of each
_SENTENCEPIECE = (("source.spm", "target.spm"), ("spiece.model",) * 2, ("sentencepiece.bpe.model",) * 2)


@dataclass(frozen=True)
class TokenRate:
    """Tokens of a text: `added` to each, and some for each byte of UTF-8."""

    per_byte: float = 1 / _BYTES_PER_TOKEN
    added: int = 1

    def tokens(self, text: str) -> int:
        """Return the estimated tokens of `text`."""
        return self.added + round(self.per_byte * len(text.encode()))


def _fit_rate(texts: Sequence[str], count: Callable[[str], int] | None) -> TokenRate:
    """Return the rate of a tokenizer on some of `texts`."""
    if count is None or not texts:
        return TokenRate()
    step = max(1, len(texts) // _TOKENIZED)
    chosen = [text[:_CHARACTERS] for text in texts[::step][:_TOKENIZED]]
    size = sum(len(text.encode()) for text in chosen)
    try:
        with rust_panics_as_errors():
            added = count("")
            tokens = sum(count(text) - added for text in chosen)
    except Exception:  # of a tokenizer or text that the step itself will report
        return TokenRate()
    return TokenRate(tokens / max(1, size), max(added, 1))


def token_counters(folder: Path | None) -> tuple[Callable[[str], int] | None, Callable[[str], int] | None]:
    """Return functions that count the tokens of sources and targets; None without a known tokenizer file."""
    if folder is None:
        return None, None
    try:
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            with rust_panics_as_errors():
                tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return (lambda text: len(tokenizer.encode(text).ids),) * 2
        for names in _SENTENCEPIECE:
            if all((folder / name).is_file() for name in names):
                from sentencepiece import SentencePieceProcessor

                found: list[Any] = [SentencePieceProcessor(model_file=str(folder / name)) for name in names]
                return tuple((lambda text, p=p: len(p.encode(text)) + 1) for p in found)  # type: ignore[return-value]
    except (
        Exception
    ):  # a damaged file is reported when the tokenizer is loaded; the libraries raise many types
        pass
    return None, None


def measure_lengths(
    splits: Mapping[str, Split], task: Task, folder: Path | None, config: Mapping[str, Any]
) -> dict[str, SampleLengths]:
    """Return the lengths of the samples of each split; empty for arrays.

    Args:
        splits: those that were read.
        task: of the recipe.
        folder: of the tokenizer; None: not available.
        config: of the model; limits the lengths.
    """
    if task == CUSTOM_TASK:
        return {}
    if task == IMAGE_CLASSIFICATION:
        return {
            name: SampleLengths((0,) * min(len(s), _MAX_SAMPLES), (0,) * min(len(s), _MAX_SAMPLES), len(s))
            for name, s in splits.items()
        }
    counters = token_counters(folder)
    limit = position_limit(config) or DEFAULT_WINDOW_LENGTH
    return {name: _lengths(split, task, counters, limit) for name, split in splits.items() if len(split)}


def _lengths(split: Split, task: Task, counters: tuple[Any, Any], limit: int) -> SampleLengths:
    step = max(1, len(split) // _MAX_SAMPLES)
    examples = split.examples[::step]
    if task == "language-modeling":
        return _windows(split, examples, counters[0], limit)
    pairs = [(text, target) for example in examples for text, target in _texts(example, task)]
    rates = [_fit_rate([pair[side] for pair in pairs], counters[side]) for side in (0, 1)]
    has_target = task in (*ENCODER_DECODER_TASKS, TEXT_GENERATION, SENTENCE_SIMILARITY)
    source = tuple(min(limit, rates[0].tokens(text)) for text, _ in pairs)
    target = tuple(min(limit, rates[1].tokens(text)) if has_target else 0 for _, text in pairs)
    return SampleLengths(source, target, round(len(pairs) * len(split) / max(1, len(examples))))


def _texts(example: Example, task: Task) -> list[tuple[str, str]]:
    """Return the texts of a sample: the inputs of the first stack, and of the second one or the target."""
    if task == SENTENCE_SIMILARITY:
        return [(example.text, example.text_pair or "")]
    if example.references:
        return [(example.text, reference) for reference in example.references]
    pair = example.text_pair
    return [(example.text if pair is None else f"{example.text} {pair}", "")]


def _windows(split: Split, examples: Sequence[Example], count: Any, limit: int) -> SampleLengths:
    rate = _fit_rate([example.text for example in examples if example.text], count)
    size = sum(len(example.text.encode()) + 1 for example in examples) * len(split) / max(1, len(examples))
    length = min((split.windows.length if split.windows else None) or DEFAULT_WINDOW_LENGTH, limit)
    number = max(1, round(rate.per_byte * size / length))
    known = min(number, _MAX_SAMPLES)
    return SampleLengths((length,) * known, (0,) * known, number)
