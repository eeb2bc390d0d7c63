"""The stage `shortlist`: learn from training samples which target tokens a source text allows.

IBM Model 1 on token ids gives the target tokens that each source token makes likely. t(target | source) is
estimated by expectation maximization over pairs of texts; every target token comes from one of the source
tokens of its sample, or from the token NULL, which takes tokens without a source.

Source: Brown et al. 1993, The Mathematics of Statistical Machine Translation, Computational Linguistics
19(2), section 4.

Shapes: P = pairs of a source and a target token in all samples, T = target tokens in all samples, U =
different pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import with_article, with_count
from smelt.data.tasks import Task, tasks_with
from smelt.generation.config import (
    GenerationSettings,
    make_shortlist,
    resolve_generation,
    vocabulary_sizes,
    write_shortlist,
)
from smelt.stage import Context, Need, Progress, Settings, Stage, no_progress

if TYPE_CHECKING:
    from smelt.generation.config import Shortlist


IntArray = NDArray[np.int64]
TokenPair = tuple[Sequence[int], Sequence[int]]
_CHUNK_PAIRS = 4_000_000  # pairs per chunk; each takes 32 bytes of working memory


@dataclass(frozen=True)
class TranslationTable:
    """Pairs of tokens that occur in a sample together, by source token, the likeliest target token first.

    source, target: int64 [U]. probability: float64 [U], t(target | source).
    """

    source: IntArray
    target: IntArray
    probability: NDArray[np.float64]


def count_word_pairs(row: TokenPair) -> int:
    """Return the number of token pairs of a sample, including those with NULL."""
    return (len(row[0]) + 1) * len(row[1])


def fit_ibm_model1(
    pairs: Sequence[TokenPair],
    num_sources: int,
    num_targets: int,
    iterations: int,
    progress: Progress = no_progress,
) -> TranslationTable:
    """Return Model 1's translation table for `pairs` (source ids, target ids); empty targets are skipped.

    Args:
        pairs: token ids of samples.
        num_sources: S, the size of the source vocabulary.
        num_targets: V, the size of the target vocabulary.
        iterations: of expectation maximization; the first starts with all pairs equally likely.
        progress: called with the number of finished iterations.
    """
    chunks, keys = _chunk_pairs(pairs, num_sources, num_targets)
    source, target = keys // num_targets, keys % num_targets
    chance = np.ones(len(keys))
    for iteration in range(iterations):
        progress(iteration, iterations, "estimating translation probabilities")
        counts = np.zeros(len(keys))
        for pair_indices, target_positions in chunks:
            weights = chance[pair_indices]
            weights /= np.bincount(target_positions, weights)[target_positions]
            counts += np.bincount(pair_indices, weights, len(keys))
        chance = counts / np.bincount(source, counts, num_sources + 1)[source]
    is_token = source < num_sources
    order = np.lexsort((target[is_token], -chance[is_token], source[is_token]))
    return TranslationTable(source[is_token][order], target[is_token][order], chance[is_token][order])


def top_targets(table: TranslationTable, num_sources: int, top_k: int, excluded: IntArray) -> list[IntArray]:
    """Return the `top_k` likeliest target tokens of each source token, without those in `excluded`."""
    allowed = ~np.isin(table.target, excluded)
    boundaries = np.searchsorted(table.source[allowed], np.arange(num_sources + 1))
    target = table.target[allowed]
    return [target[start : min(end, start + top_k)] for start, end in pairwise(boundaries)]


def _chunk_pairs(pairs: Sequence[TokenPair], sources: int, targets: int) -> tuple[list[Any], IntArray]:
    """Return the pairs of each chunk of samples with their target positions, int32 each, and keys int64 [U].

    A pair is the number of its key, source * targets + target; the source of NULL is `sources`.
    """
    parts, keys = [], np.zeros(0, dtype=np.int64)
    index = 0
    while index < len(pairs):
        size, start = 0, index
        while index < len(pairs) and (
            index == start or size + count_word_pairs(pairs[index]) <= _CHUNK_PAIRS
        ):
            size += count_word_pairs(pairs[index])
            index += 1
        pair_keys, positions = _pair_keys(pairs[start:index], sources, targets)
        unique_keys, inverse = np.unique(pair_keys, return_inverse=True)
        parts.append((unique_keys, inverse.astype(np.int32), positions))
        keys = np.union1d(keys, unique_keys)
    return [
        (np.searchsorted(keys, unique_keys).astype(np.int32)[n], positions)
        for unique_keys, n, positions in parts
    ], keys


def _pair_keys(pairs: Sequence[TokenPair], sources: int, targets: int) -> tuple[IntArray, NDArray[np.int32]]:
    """Return the keys of all pairs, int64 [P], and the target position of each, int32 [P]."""
    source_ids = np.concatenate([[*source, sources] for source, _ in pairs]).astype(np.int64)
    lengths = np.array([len(source) + 1 for source, _ in pairs])
    starts = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(pairs)), [len(target) for _, target in pairs])  # [T]
    source_lengths = lengths[owner]
    positions = np.repeat(np.arange(len(owner), dtype=np.int32), source_lengths)
    offsets = np.arange(len(positions)) - np.repeat(
        np.cumsum(source_lengths) - source_lengths, source_lengths
    )
    token_ids = np.concatenate([np.asarray(target, dtype=np.int64) for _, target in pairs])
    return source_ids[starts[owner][positions] + offsets] * targets + token_ids[positions], positions


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


class ShortlistStage(Stage[ShortlistSettings]):
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
    needs: ClassVar[frozenset[Need]] = frozenset({"train"})
    source: ClassVar[str] = (
        "Jean et al. 2015, arXiv:1412.2007; L'Hostis et al. 2016, arXiv:1610.00072; IBM Model 1: Brown et al."
        " 1993, Computational Linguistics 19(2)"
    )
    version: ClassVar[int] = 1
    changes_weights: ClassVar[bool] = False
    settings_type: ClassVar[type[ShortlistSettings]] = ShortlistSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(tasks_with(architecture="encoder-decoder", modality="text"))

    @classmethod
    def provides(cls, settings: ShortlistSettings) -> frozenset[str]:
        """Return what later steps may lose: the shortlist."""
        return frozenset({"shortlist"})

    def __call__(self, src: Artifact, settings: ShortlistSettings, ctx: Context) -> None:
        """Learn a shortlist for the model of `src` and write both into `ctx.out`."""
        from smelt.models.checkpoint import load_model, load_tokenizer, save_model

        model, edits = load_model(src.path)
        if not model.config.is_encoder_decoder:
            raise InputError(
                f"shortlist: {with_article(model.config.model_type)} model has no encoder for the source"
                " text;"
                " a shortlist needs an encoder-decoder model. Remove the stage.",
                code="does-not-fit-model",
            )
        tokenizer = load_tokenizer(src.path)
        pairs = _encode_pairs(model.config, tokenizer, ctx, "train", settings.max_train_samples)
        shortlist = learn_shortlist(
            pairs, model.config.to_dict(), _required_tokens(src, tokenizer), settings, ctx.progress
        )
        ctx.details.update(rows=len(pairs), **_shortlist_sizes(shortlist, model.config.to_dict()))
        if len(pairs) < _MIN_SAMPLES:
            ctx.warn(
                "limited-rows",
                f"The shortlist was learned from only {with_count(len(pairs), 'sample')}, so the scores"
                " of this step are not meaningful. Use more training samples, or run without --limit.",
            )
        if "validation" not in ctx.data:
            ctx.warn(
                "no-validation-data",
                "Without validation data the coverage of the shortlist is unknown. Add data: {validation:"
                " FILE}.",
            )
        else:
            validation_pairs = _encode_pairs(model.config, tokenizer, ctx, "validation", _COVERAGE_SAMPLES)
            ctx.details["validation"] = coverage = shortlist_coverage(
                shortlist, validation_pairs, model.config.to_dict()
            )
            if coverage["covered"] < _MIN_COVERAGE:
                ctx.warn(
                    "tokens-not-covered",
                    f"The shortlist lacks {1 - coverage['covered']:.1%} of the tokens of the validation"
                    " references. Increase candidates_per_token or frequent_tokens, or add training samples.",
                )
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path))
        write_shortlist(shortlist, ctx.out)


def learn_shortlist(
    pairs: Sequence[TokenPair],
    config: dict[str, Any],
    required_tokens: Sequence[int] | IntArray,
    settings: ShortlistSettings,
    progress: Progress = no_progress,
) -> Shortlist:
    """Return the shortlist learned from `pairs` of token ids (source, target).

    Args:
        pairs: the training samples.
        config: the model's, config.json.
        required_tokens: tokens that generation itself may need, in addition to the frequent ones.
        settings: of the stage.
        progress: called with the progress of training.
    """
    sources, targets = vocabulary_sizes(config)
    counts = np.bincount(np.concatenate([target for _, target in pairs]), minlength=targets)
    frequent = np.argsort(-counts, kind="stable")[: settings.frequent_tokens]
    always = np.unique([*required_tokens, *frequent])
    likely = fit_ibm_model1(pairs, sources, targets, settings.iterations, progress)
    lists = top_targets(likely, sources, settings.candidates_per_token, always)
    if config.get("share_encoder_decoder_embeddings", True) and sources == targets:
        # names and numbers are copied, so the source token itself is always allowed
        lists = [np.unique([source_id, *candidates]) for source_id, candidates in enumerate(lists)]
    widest = max(1, *map(len, lists))
    table = np.full((sources, widest), always[0])
    for source_id, candidates in enumerate(lists):
        table[source_id, : len(candidates)] = candidates
        table[source_id, len(candidates) :] = candidates[-1] if len(candidates) else always[0]
    return make_shortlist(table, always, targets)


def shortlist_coverage(
    shortlist: Shortlist, pairs: Sequence[TokenPair], config: dict[str, Any]
) -> dict[str, float]:
    """Return the coverage of `pairs` by a shortlist as fractions, and its mean length.

    covered: fraction of reference tokens on the list of their sample. whole: fraction of samples with all
    reference tokens on the list. words: mean number of allowed tokens per sample.
    """
    from smelt.generation.backend import Batch

    _, targets = vocabulary_sizes(config)
    hits = num_tokens = num_covered = num_allowed = 0
    for source, target in pairs:
        ids = np.array([source], dtype=np.int64)
        [allowed] = shortlist.allowed_tokens(Batch(ids, np.ones_like(ids)), targets)
        num_hits = int(allowed[list(target)].sum())
        hits, num_tokens, num_covered = (
            hits + num_hits,
            num_tokens + len(target),
            num_covered + (num_hits == len(target)),
        )
        num_allowed += int(allowed.sum())
    count = max(1, len(pairs))
    return {
        "covered": round(hits / max(1, num_tokens), 5),
        "whole": round(num_covered / count, 5),
        "words": round(num_allowed / count, 1),
    }


def _shortlist_sizes(shortlist: Shortlist, config: dict[str, Any]) -> dict[str, Any]:

    size = shortlist.table.nbytes + shortlist.always.nbytes
    return {
        "vocabulary": vocabulary_sizes(config)[1], "always": len(shortlist.always),
        "candidates_per_token": shortlist.table.shape[1], "size_bytes": size,
    }  # fmt: skip


def _encode_pairs(config: Any, tokenizer: Any, ctx: Context, split: str, most: int | None) -> list[TokenPair]:
    """Return source and target ids of at most `most` samples of a split, limited by memory."""
    from smelt.data.splits import spread_indices
    from smelt.tasks.encode_split import encode_split

    full_split = ctx.data[split]
    indices = spread_indices(len(full_split), len(full_split) if most is None else most, ctx.seed)
    selected = full_split.select(indices)
    encoded = [
        (sample.input_ids, sample.target)
        for sample in encode_split(selected, config, tokenizer, ctx, split_name=split)
    ]
    pairs: list[TokenPair] = [
        (source, target) for source, target in encoded if isinstance(target, list) and target
    ]
    total = sum(map(count_word_pairs, pairs))
    if total > _MAX_PAIRS:
        kept_indices = spread_indices(len(pairs), max(1, len(pairs) * _MAX_PAIRS // total), ctx.seed)
        ctx.warn(
            "rows-left-out",
            f"{split}: only {len(kept_indices)} of {len(pairs)} samples are used, to limit the computation"
            " time on long texts.",
        )
        pairs = [pairs[index] for index in kept_indices]
    return pairs


def _required_tokens(src: Artifact, tokenizer: Any) -> IntArray:
    """Return the end-of-text, forced beginning and unknown tokens."""
    from smelt.generation.runner import read_model_files

    files: Any = read_model_files(src.path)
    decoding = resolve_generation(GenerationSettings(), files)
    candidates = [
        *decoding.eos,
        *decoding.forced_eos_token_id,
        decoding.forced_bos_token_id,
        tokenizer.unk_token_id,
    ]
    return np.array([token for token in candidates if token is not None], dtype=np.int64)
