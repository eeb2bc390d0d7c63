"""The stage `shortlist`: learn from training samples which target tokens a source text allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from smelt.compress.shortlist.ibm_model1 import (
    IntArray,
    TokenPair,
    count_word_pairs,
    fit_ibm_model1,
    top_targets,
)
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TEXT_TO_TEXT_TASKS, Task
from smelt.core.errors import InputError
from smelt.core.stage import Context, Need, Progress, Settings, no_progress
from smelt.core.text import with_article, with_count

if TYPE_CHECKING:
    from smelt.runtime.generate.shortlist import Shortlist

_MAX_PAIRS = 50_000_000  # of tokens; 8 bytes each
_COVERAGE_SAMPLES = 2000  # validation samples
_MIN_COVERAGE = 0.95  # of the reference tokens; below it quality is likely to fall
_MIN_SAMPLES = 1000  # training samples


class ShortlistSettings(Settings):
    """Settings of `shortlist`."""

    candidates_per_token: int = Field(
        default=50,
        ge=1,
        le=1000,
        description="number of most probable target tokens for each source token",
    )
    frequent_tokens: int = Field(
        default=100, ge=2, le=100_000, description="number of most frequent target tokens, always allowed"
    )
    iterations: int = Field(default=5, ge=1, le=50, description="iterations of expectation maximization")
    max_train_samples: int | None = Field(
        default=None,
        ge=1,
        description="training samples used, spread over the file; default: all",
    )


class ShortlistStage:
    """Generate only tokens that the tokens of the source make likely.

    The output layer of a translation model computes logits for the whole vocabulary in each step.
    This stage learns from the training samples which target tokens belong to which source tokens
    (IBM Model 1). Each source token allows its likeliest target tokens and itself; the most
    frequent tokens are always allowed. Weights do not change. `generate.onnx` reads only the rows
    of the output layer that the inputs of a call allow; other runtimes mask the other tokens.
    Later stages keep the shortlist.

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
    tasks: ClassVar[frozenset[Task]] = TEXT_TO_TEXT_TASKS

    @classmethod
    def provides(cls, settings: ShortlistSettings) -> frozenset[str]:
        """Return what later steps may lose: the shortlist."""
        return frozenset({"shortlist"})

    def __call__(self, src: Artifact, settings: ShortlistSettings, ctx: Context) -> None:
        """Learn a shortlist for the model of `src` and write both into `ctx.out`."""
        from smelt.runtime.generate.shortlist import write_shortlist
        from smelt.runtime.models.checkpoint import load_model, load_tokenizer, save_model

        model, edits = load_model(src.path)
        if not model.config.is_encoder_decoder:
            raise InputError(
                f"shortlist: {with_article(model.config.model_type)} model has no encoder for the source"
                " text;"
                " a shortlist needs an encoder-decoder model. Remove the stage.",
                code="does-not-fit-model",
            )
        tokenizer = load_tokenizer(src.path)
        rows = _encode_pairs(model.config, tokenizer, ctx, "train", settings.max_train_samples)
        shortlist = learn_shortlist(
            rows, model.config.to_dict(), _required_tokens(src, tokenizer), settings, ctx.progress
        )
        ctx.details.update(rows=len(rows), **_shortlist_sizes(shortlist, model.config.to_dict()))
        if len(rows) < _MIN_SAMPLES:
            ctx.warn(
                "limited-rows",
                f"The shortlist was learned from only {with_count(len(rows), 'sample')}, so the scores"
                " of this step are not meaningful. Use more training samples, or run without --limit.",
            )
        if "validation" not in ctx.data:
            ctx.warn(
                "no-validation-data",
                "Without validation data the coverage of the shortlist is unknown. Add data: {validation:"
                " FILE}.",
            )
        else:
            seen = _encode_pairs(model.config, tokenizer, ctx, "validation", _COVERAGE_SAMPLES)
            ctx.details["validation"] = found = shortlist_coverage(shortlist, seen, model.config.to_dict())
            if found["covered"] < _MIN_COVERAGE:
                ctx.warn(
                    "tokens-not-covered",
                    f"The shortlist lacks {1 - found['covered']:.1%} of the tokens of the validation"
                    " references. Increase candidates_per_token or frequent_tokens, or add training samples.",
                )
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path))
        write_shortlist(shortlist, ctx.out)


def learn_shortlist(
    rows: Sequence[TokenPair],
    config: dict[str, Any],
    required_tokens: Sequence[int] | IntArray,
    settings: ShortlistSettings,
    progress: Progress = no_progress,
) -> Shortlist:
    """Return the shortlist learned from `rows` of token ids (source, target).

    Args:
        rows: the training samples.
        config: the model's, config.json.
        required_tokens: tokens that generation itself may need, in addition to the frequent ones.
        settings: of the stage.
        progress: called with the progress of training.
    """
    from smelt.runtime.generate.shortlist import make_shortlist, vocabulary_sizes

    sources, targets = vocabulary_sizes(config)
    counts = np.bincount(np.concatenate([target for _, target in rows]), minlength=targets)
    often = np.argsort(-counts, kind="stable")[: settings.frequent_tokens]
    everywhere = np.unique([*required_tokens, *often])
    likely = fit_ibm_model1(rows, sources, targets, settings.iterations, progress)
    lists = top_targets(likely, sources, settings.candidates_per_token, everywhere)
    if config.get("share_encoder_decoder_embeddings", True) and sources == targets:
        # names and numbers are copied, so the source token itself is always allowed
        lists = [np.unique([word, *found]) for word, found in enumerate(lists)]
    widest = max(1, *map(len, lists))
    table = np.full((sources, widest), everywhere[0])
    for word, found in enumerate(lists):
        table[word, : len(found)] = found
        table[word, len(found) :] = found[-1] if len(found) else everywhere[0]
    return make_shortlist(table, everywhere, targets)


def shortlist_coverage(
    shortlist: Shortlist, rows: Sequence[TokenPair], config: dict[str, Any]
) -> dict[str, float]:
    """Return the coverage of `rows` by a shortlist as fractions, and its mean length.

    covered: fraction of reference tokens on the list of their sample. whole: fraction of samples with all
    reference tokens on the list. words: mean number of allowed tokens per sample.
    """
    from smelt.runtime.batch import Batch
    from smelt.runtime.generate.shortlist import vocabulary_sizes

    _, targets = vocabulary_sizes(config)
    hits = words = whole = listed = 0
    for source, target in rows:
        ids = np.array([source], dtype=np.int64)
        [allowed] = shortlist.allowed_tokens(Batch(ids, np.ones_like(ids)), targets)
        found = int(allowed[list(target)].sum())
        hits, words, whole = hits + found, words + len(target), whole + (found == len(target))
        listed += int(allowed.sum())
    count = max(1, len(rows))
    return {
        "covered": round(hits / max(1, words), 5),
        "whole": round(whole / count, 5),
        "words": round(listed / count, 1),
    }


def _shortlist_sizes(shortlist: Shortlist, config: dict[str, Any]) -> dict[str, Any]:
    from smelt.runtime.generate.shortlist import vocabulary_sizes

    size = shortlist.table.nbytes + shortlist.always.nbytes
    return {
        "vocabulary": vocabulary_sizes(config)[1], "always": len(shortlist.always),
        "candidates_per_token": shortlist.table.shape[1], "size_bytes": size,
    }  # fmt: skip


def _encode_pairs(config: Any, tokenizer: Any, ctx: Context, split: str, most: int | None) -> list[TokenPair]:
    """Return source and target ids of at most `most` samples of a split, limited by memory."""
    from smelt.compress.train.encoded_samples import encode_split, spread_indices

    given = ctx.data[split]
    chosen = spread_indices(len(given), len(given) if most is None else most, ctx.seed)
    part = given.select(chosen)
    rows = [
        (row.input_ids, row.target) for row in encode_split(part, config, tokenizer, ctx, split_name=split)
    ]
    pairs: list[TokenPair] = [
        (source, target) for source, target in rows if isinstance(target, list) and target
    ]
    total = sum(map(count_word_pairs, pairs))
    if total > _MAX_PAIRS:
        kept = spread_indices(len(pairs), max(1, len(pairs) * _MAX_PAIRS // total), ctx.seed)
        ctx.warn(
            "rows-left-out",
            f"{split}: only {len(kept)} of {len(pairs)} samples are used, to limit the computation"
            " time on long texts.",
        )
        pairs = [pairs[at] for at in kept]
    return pairs


def _required_tokens(src: Artifact, tokenizer: Any) -> IntArray:
    """Return the end-of-text, forced beginning and unknown tokens."""
    from smelt.runtime.generate.generation_config import resolve_generation
    from smelt.runtime.generate.settings import GenerationSettings
    from smelt.runtime.runner import read_model_files

    files: Any = read_model_files(src.path)
    decoding = resolve_generation(GenerationSettings(), files)
    found = [
        *decoding.eos,
        *decoding.forced_eos_token_id,
        decoding.forced_bos_token_id,
        tokenizer.unk_token_id,
    ]
    return np.array([token for token in found if token is not None], dtype=np.int64)
