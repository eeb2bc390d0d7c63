"""More training texts for a student: words are replaced by others that a masked language model finds likely.

Jiao et al. 2020, TinyBERT, arXiv:1909.10351, algorithm 1. Each word that is one token is masked in turn;
the model reads the masked text and, as a second text, the original one. The likeliest tokens are the
candidates. A word of several tokens gets its nearest neighbors by word vectors, or is kept without these.
Each copy of a text replaces every word with a probability by one of its candidates, drawn uniformly. English
stop words (those of scikit-learn) are never replaced.

Source: github.com/huawei-noah/Pretrained-Language-Model, TinyBERT/data_augmentation.py. Unlike there, only
the replaced words change: spaces, case and punctuation around them are kept.

Shapes: W = words of a text that are masked, L = tokens, V = vocabulary, D = width of word vectors.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from smelt.core.errors import InputError
from smelt.core.files import json_hash, read_json_object, sha256_of
from smelt.core.messages import Message, error_message
from smelt.data.splits import Example, Split
from smelt.stage import Context, RecipePath, Settings

AUGMENTATION_VERSION = 1  # raise it whenever the same settings give other texts
MAX_VECTORS = 100_000  # words of a file of vectors, which lists frequent ones first
_WORD = re.compile(r"[^\W\d_]+")
_PIECE_MARKERS = ("##", "▁", "Ġ")  # of a token inside of a word (WordPiece), or at its start


class AugmentationSettings(Settings):
    """Copies of the training texts with replaced words."""

    model: RecipePath = Field(description="folder of a masked language model with a fast tokenizer")
    vectors: RecipePath = Field(
        default=None, description="word vectors for words of several tokens, as GloVe's text files"
    )
    copies: int = Field(default=20, ge=1, le=1000, description="copies of each text (N)")
    probability: float = Field(default=0.4, gt=0, le=1, description="of replacing a word (p)")
    top_k: int = Field(default=15, ge=1, le=1000, description="candidates of a word (K)")


def check_augmentation(settings: AugmentationSettings) -> list[Message]:
    """Return an error if the model, by its config, is no masked language model."""
    try:
        classes = read_json_object(Path(settings.model or "") / "config.json").get("architectures") or []
    except InputError:
        return []  # reported when the folder is checked, or opened
    if any(str(name).endswith("ForMaskedLM") for name in classes):
        return []
    text = f"{settings.model}: {', '.join(map(str, classes)) or 'no class in config.json'}; expected a masked"
    text += " language model (...ForMaskedLM)."
    return [error_message("different-kind", text, setting="augmentation.model")]


class WordSpan(NamedTuple):
    """Where a word begins and ends in its text."""

    start: int
    end: int


class WordVectors:
    """Nearest neighbors of words by the cosine of their vectors. path: a word and its values in each line.

    Raises:
        InputError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        tokens, rows = list[str](), list[list[float]]()
        try:
            with path.open(encoding="utf-8") as lines:
                for _, line in zip(range(MAX_VECTORS), lines, strict=False):
                    token, *values = line.split()
                    tokens.append(token)
                    if rows and len(values) != len(rows[0]):
                        raise ValueError(f"{len(values)} numbers, and {len(rows[0])} in the first line")
                    rows.append([float(value) for value in values])
            vectors = np.asarray(rows, dtype=np.float32)
            self._directions = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        except (OSError, ValueError) as error:
            raise InputError(
                f"distill: augmentation.vectors: {path}, line {len(rows) + 1}: expected a word and as"
                f" many numbers as in the first line: {error}",
                code="damaged-file",
                setting="augmentation.vectors",
                file=str(path),
                line=len(rows) + 1,
            ) from error
        self._tokens, self._indices = tokens, {token: index for index, token in enumerate(tokens)}

    def neighbors(self, text: str, count: int) -> list[str]:
        """Return the `count` words that are nearest to the word `text`; none for an unknown one."""
        index = self._indices.get(text, self._indices.get(text.lower()))
        if index is None:
            return []
        cosines = self._directions @ self._directions[index]
        cosines[index] = -np.inf
        return [self._tokens[i] for i in np.argsort(-cosines, kind="stable")[:count]]


class CandidateFinder:
    """Finds the candidates for the words of a text. settings: with the folder of a masked language model.

    Raises:
        InputError: the model cannot be read, or is no masked language model with a fast tokenizer.
    """

    def __init__(self, settings: AugmentationSettings) -> None:
        from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

        from smelt.models.checkpoint import load_model, load_tokenizer
        from smelt.models.families.registry import predicts_tokens
        from smelt.models.text_rules import max_input_length

        folder = Path(settings.model or "")
        self._model, _ = load_model(folder)
        self._tokenizer = load_tokenizer(folder)
        if (
            not predicts_tokens(self._model)
            or not self._tokenizer.is_fast
            or self._tokenizer.mask_token is None
        ):
            raise InputError(
                f"distill: augmentation.model: {folder} is a {type(self._model).__name__}; expected a masked"
                " language model with a fast tokenizer that has a mask token.",
                code="different-kind",
                setting="augmentation.model",
            )
        self._limit = max_input_length(self._tokenizer, self._model.config.to_dict())
        self._vectors = None if settings.vectors is None else WordVectors(Path(settings.vectors))
        self._top_k, self._stop_words = settings.top_k, ENGLISH_STOP_WORDS

    def candidates(self, text: str) -> dict[WordSpan, list[str]]:
        """Return the candidates for each word of `text` that has any."""
        spans = [
            WordSpan(*match.span())
            for match in _WORD.finditer(text)
            if match[0].lower() not in self._stop_words
        ]
        encoding = self._tokenizer(
            text, text, truncation=True, max_length=self._limit, return_offsets_mapping=True, verbose=False
        )
        positions = {
            WordSpan(*span): position
            for position, (span, owner) in enumerate(
                zip(encoding["offset_mapping"], encoding.sequence_ids(), strict=True)
            )
            if owner == 0
        }
        single = [span for span in spans if span in positions]
        candidates = dict(zip(single, self._predict(encoding, [positions[s] for s in single]), strict=True))
        for span in spans:
            original = text[slice(*span)]
            replacements = candidates.get(span)
            if replacements is None and self._vectors is not None:
                replacements = self._vectors.neighbors(original, self._top_k)
            candidates[span] = [r.title() if original.istitle() else r for r in replacements or ()]
        return {span: replacements for span, replacements in candidates.items() if replacements}

    def _predict(self, encoding: Any, positions: Sequence[int]) -> list[list[str]]:
        """Return the likeliest words at each of the `positions`, masked one at a time."""
        import torch

        if not positions:
            return []
        ids = torch.tensor(encoding["input_ids"])
        rows = ids.repeat(len(positions), 1)
        rows[range(len(positions)), list(positions)] = self._tokenizer.mask_token_id
        types = encoding.get("token_type_ids")
        inputs = {} if types is None else {"token_type_ids": torch.tensor(types).expand_as(rows)}
        with torch.inference_mode():
            logits = self._model(rows, **inputs).logits[range(len(positions)), list(positions)]
        best = logits.topk(min(self._top_k, logits.shape[1])).indices.tolist()
        originals = self._tokenizer.convert_ids_to_tokens([int(ids[position]) for position in positions])
        return [self._words_like(original, tokens) for original, tokens in zip(originals, best, strict=True)]

    def _words_like(self, original: str, token_ids: Sequence[int]) -> list[str]:
        """Return the texts of those tokens that begin or continue a word as `original` does."""
        special = set(self._tokenizer.all_special_ids)
        pieces = self._tokenizer.convert_ids_to_tokens([i for i in token_ids if i not in special])
        marker = _piece_marker(original)
        return [piece.removeprefix(marker) for piece in pieces if _piece_marker(piece) == marker]


def _piece_marker(piece: str) -> str:
    return next((marker for marker in _PIECE_MARKERS if piece.startswith(marker)), "")


def replace_words(
    text: str,
    candidates: Mapping[WordSpan, Sequence[str]],
    copies: int,
    probability: float,
    rng: random.Random,
) -> list[str]:
    """Return at most `copies` different texts, in each of which words are replaced with `probability`.

    Args:
        text: the text.
        candidates: for each of its words, at least one.
        copies: how often words are drawn; equal texts, and `text` itself, are left out.
        probability: of each word.
        rng: the source of randomness.
    """
    texts: dict[str, None] = {}
    for _ in range(copies):
        parts, end = [], 0
        for span in sorted(candidates):
            candidate = rng.choice(candidates[span])
            if rng.random() < probability:
                parts += [text[end : span.start], candidate]
                end = span.end
        texts["".join([*parts, text[end:]])] = None
    texts.pop(text, None)
    return list(texts)


def augment_training_samples(settings: AugmentationSettings, ctx: Context) -> Context:
    """Return `ctx` with the copies of the training samples after each of them; the copies are cached.

    `ctx.details["augmentation"]` receives the number of copies.
    """
    split = ctx.data["train"]
    files = sorted(path for path in Path(settings.model or "").iterdir() if path.is_file())
    files += [Path(settings.vectors)] if settings.vectors is not None else []
    copies = ctx.cached_value(
        {
            "what": "augmentation",
            "version": AUGMENTATION_VERSION,
            "files": json_hash([[path.name, sha256_of(path)] for path in files]),
            "settings": settings.model_dump(mode="json", exclude={"model", "vectors"}),
            "rows": json_hash([[e.text, e.text_pair] for e in split.examples]),
            "seed": ctx.seed,
        },
        lambda: _make_copies(settings, split, ctx),
    )
    examples = [
        example
        for original, pairs in zip(split.examples, copies, strict=True)
        for example in (original, *(replace(original, text=text, text_pair=pair) for text, pair in pairs))
    ]
    ctx.details["augmentation"] = {"copies": len(examples) - len(split)}
    return replace(ctx, data={**ctx.data, "train": replace(split, examples=tuple(examples))})


def _make_copies(
    settings: AugmentationSettings, split: Split, ctx: Context
) -> list[list[tuple[str, str | None]]]:
    """Return for each sample its copies; of a pair, one text at a time is changed."""
    finder, copies = CandidateFinder(settings), []
    for index, example in enumerate(split.examples):
        rng = random.Random(f"{ctx.seed}/{index}")
        copies.append(_example_copies(example, settings, finder.candidates, rng))
        ctx.progress(index + 1, len(split), "augmentation")
    return copies


def _example_copies(
    example: Example,
    settings: AugmentationSettings,
    find_candidates: Callable[[str], Mapping[WordSpan, Sequence[str]]],
    rng: random.Random,
) -> list[tuple[str, str | None]]:
    def changed(text: str) -> list[str]:
        return replace_words(text, find_candidates(text), settings.copies, settings.probability, rng)

    pairs: list[tuple[str, str | None]] = [(text, example.text_pair) for text in changed(example.text)]
    if example.text_pair is not None:
        pairs += [(example.text, text) for text in changed(example.text_pair)]
    return pairs
