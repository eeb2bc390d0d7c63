"""The shortlist stage: which words may come in a text, learned from the training rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from smelt.compress.shortlist.word_table import Ints, Pair, best, learn, pair_count
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TEXT_TO_TEXT, Task
from smelt.core.errors import InputError
from smelt.core.stage import Context, Need, Progress, Settings, silent
from smelt.core.text import article, count

if TYPE_CHECKING:
    from smelt.runtime.generate.shortlist import Shortlist

_MOST_PAIRS = 50_000_000  # of words; 8 bytes each
_SEEN = 2000  # validation rows
_FEW = 0.95  # of a reference's words; below it quality is likely to fall
_MEAGRE = 1000  # training rows


class ShortlistSettings(Settings):
    """Settings of `shortlist`."""

    candidates_per_token: int = Field(
        default=50,
        ge=1,
        le=1000,
        description="likeliest target tokens of each source token",
    )
    frequent_tokens: int = Field(
        default=100, ge=2, le=100_000, description="most frequent tokens, always allowed"
    )
    iterations: int = Field(default=5, ge=1, le=50, description="of expectation maximization")
    max_train_samples: int | None = Field(
        default=None,
        ge=1,
        description="training samples used, spread over the file; default all",
    )


class ShortlistStage:
    """Let only those words come in a text that the words of its source make likely.

    The head of a translator multiplies with every word of the vocabulary to find the next one. From the
    training rows this stage learns which words go with which (IBM Model 1), and keeps for each token of the
    source its likeliest ones, itself among them; the most frequent words may come everywhere. Weights stay
    as they are. In `generate.onnx` only the rows of the head are read that the texts of a call ask for;
    every other runtime hides the other words. Later stages keep the list.

        - shortlist: {candidates_per_token: 50, frequent_tokens: 100}
        - quantize: {scheme: int8-dynamic}
        - onnx: {target: ort-cpu}
    """

    name: ClassVar[str] = "shortlist"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train"})
    source: ClassVar[str] = (
        "Jean et al. 2015, arXiv:1412.2007; L'Hostis et al. 2016, arXiv:1610.00072; IBM Model 1: Brown et al."
        " 1993, Computational Linguistics 19(2)"
    )
    version: ClassVar[int] = 1
    settings_type: ClassVar[type[ShortlistSettings]] = ShortlistSettings
    tasks: ClassVar[frozenset[Task]] = TEXT_TO_TEXT

    @classmethod
    def leaves(cls, settings: ShortlistSettings) -> frozenset[str]:
        """Return what later steps may lose: which words go with which."""
        return frozenset({"shortlist"})

    def __call__(self, src: Artifact, settings: ShortlistSettings, ctx: Context) -> None:
        """Learn a shortlist for the model of `src` and write both into `ctx.out`."""
        from smelt.runtime.generate.shortlist import write_shortlist
        from smelt.runtime.models.checkpoint import load_model, load_tokenizer, save_model

        model, edits = load_model(src.path)
        if not model.config.is_encoder_decoder:
            raise InputError(
                f"shortlist: {article(model.config.model_type)} model reads no source text apart from what it"
                " writes; a shortlist is for models with an encoder and a decoder.",
                code="does-not-fit-model",
            )
        tokenizer = load_tokenizer(src.path)
        rows = _pairs(model.config, tokenizer, ctx, "train", settings.max_train_samples)
        shortlist = learned(rows, model.config.to_dict(), _always(src, tokenizer), settings, ctx.progress)
        ctx.details.update(rows=len(rows), **_sizes(shortlist, model.config.to_dict()))
        if len(rows) < _MEAGRE:
            ctx.warn(
                "limited-rows",
                f"The shortlist was learned from {count(len(rows), 'sample')} only, so its scores mean"
                " little. A run with --limit learns from these samples alone.",
            )
        if "validation" not in ctx.data:
            ctx.warn(
                "no-validation-data",
                "Without validation data the coverage of the shortlist is unknown. Add data: {validation:"
                " FILE}.",
            )
        else:
            seen = _pairs(model.config, tokenizer, ctx, "validation", _SEEN)
            ctx.details["validation"] = found = coverage(shortlist, seen, model.config.to_dict())
            if found["covered"] < _FEW:
                ctx.warn(
                    "tokens-not-covered",
                    f"The shortlist lacks {1 - found['covered']:.1%} of the tokens of the validation"
                    " references. Increase candidates_per_token or frequent_tokens, or add training samples.",
                )
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path))
        write_shortlist(shortlist, ctx.out)


def learned(
    rows: Sequence[Pair],
    config: dict[str, Any],
    always: Sequence[int] | Ints,
    settings: ShortlistSettings,
    tell: Progress = silent,
) -> Shortlist:
    """Return the shortlist that `rows` of token ids (source, target) speak for.

    Args:
        rows: of the training data.
        config: the model's, config.json.
        always: words that generation itself may need, besides the frequent ones.
        settings: the stage's.
        tell: is told how far the learning is.
    """
    from smelt.runtime.generate.shortlist import make_shortlist, vocabularies

    sources, targets = vocabularies(config)
    counts = np.bincount(np.concatenate([target for _, target in rows]), minlength=targets)
    often = np.argsort(-counts, kind="stable")[: settings.frequent_tokens]
    everywhere = np.unique([*always, *often])
    likely = learn(rows, sources, targets, settings.iterations, tell)
    lists = best(likely, sources, settings.candidates_per_token, everywhere)
    if config.get("share_encoder_decoder_embeddings", True) and sources == targets:
        # names and numbers are copied; the word itself need not be among what was seen
        lists = [np.unique([word, *found]) for word, found in enumerate(lists)]
    widest = max(1, *map(len, lists))
    table = np.full((sources, widest), everywhere[0])
    for word, found in enumerate(lists):
        table[word, : len(found)] = found
        table[word, len(found) :] = found[-1] if len(found) else everywhere[0]
    return make_shortlist(table, everywhere, targets)


def coverage(shortlist: Shortlist, rows: Sequence[Pair], config: dict[str, Any]) -> dict[str, float]:
    """Return what a shortlist has of `rows`, as shares, and how many words it has for one.

    covered: of the words of the references, that many are on their row's list. whole: of so many rows all
    words are. words: on the list of a row, in the mean.
    """
    from smelt.runtime.batch import Batch
    from smelt.runtime.generate.shortlist import vocabularies

    _, targets = vocabularies(config)
    hits = words = whole = listed = 0
    for source, target in rows:
        ids = np.array([source], dtype=np.int64)
        [allowed] = shortlist.allowed(Batch(ids, np.ones_like(ids)), targets)
        found = int(allowed[list(target)].sum())
        hits, words, whole = hits + found, words + len(target), whole + (found == len(target))
        listed += int(allowed.sum())
    count = max(1, len(rows))
    return {
        "covered": round(hits / max(1, words), 5),
        "whole": round(whole / count, 5),
        "words": round(listed / count, 1),
    }


def _sizes(shortlist: Shortlist, config: dict[str, Any]) -> dict[str, Any]:
    from smelt.runtime.generate.shortlist import vocabularies

    size = shortlist.table.nbytes + shortlist.always.nbytes
    return {
        "vocabulary": vocabularies(config)[1], "always": len(shortlist.always),
        "candidates_per_token": shortlist.table.shape[1], "size_bytes": size,
    }  # fmt: skip


def _pairs(config: Any, tokenizer: Any, ctx: Context, split: str, most: int | None) -> list[Pair]:
    """Return source and target ids of at most `most` rows of a split, and not more than memory holds."""
    from smelt.compress.train.data import encode_split, spread_out

    given = ctx.data[split]
    chosen = spread_out(len(given), len(given) if most is None else most, ctx.seed)
    part = given.some(chosen)
    rows = [(row.source, row.target) for row in encode_split(part, config, tokenizer, ctx, what=split)]
    pairs: list[Pair] = [(source, target) for source, target in rows if isinstance(target, list) and target]
    total = sum(map(pair_count, pairs))
    if total > _MOST_PAIRS:
        kept = spread_out(len(pairs), max(1, len(pairs) * _MOST_PAIRS // total), ctx.seed)
        ctx.warn(
            "rows-left-out",
            f"{split}: only {len(kept)} of {len(pairs)} samples are used, because their texts are long.",
        )
        pairs = [pairs[at] for at in kept]
    return pairs


def _always(src: Artifact, tokenizer: Any) -> Ints:
    """Return what ends texts, begins them by force, and stands for what is no word."""
    from smelt.runtime.generate.decoding import settle
    from smelt.runtime.generate.settings import Generation
    from smelt.runtime.runner import read_files

    files: Any = read_files(src.path)
    decoding = settle(Generation(), files)
    found = [
        *decoding.eos,
        *decoding.forced_eos_token_id,
        decoding.forced_bos_token_id,
        tokenizer.unk_token_id,
    ]
    return np.array([token for token in found if token is not None], dtype=np.int64)
