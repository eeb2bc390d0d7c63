"""Sequence-level distillation: the student trains on targets that a teacher generates.

Kim & Rush 2016, Sequence-Level Knowledge Distillation, arXiv:1606.07947: the teacher decodes the sources of
the training samples with beam search, and the student trains on the result (Seq-KD), or on the candidate
that is closest to the reference (Seq-Inter).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smelt.compress.distill.settings import SequenceSettings
from smelt.core.artifact import Artifact
from smelt.core.bleu_tokenizer import bleu_tokenizer
from smelt.core.data import Split
from smelt.core.files import json_hash
from smelt.core.stage import Context
from smelt.runtime.text.text_preprocessing import read_text_rules

GENERATION_VERSION = 1  # raise it whenever the same settings generate other texts


def generate_targets(teacher: Artifact, settings: SequenceSettings, ctx: Context) -> Split:
    """Return the training samples with generated targets; `original_ratio` of them keep their own target.

    `ctx.details["sequence_level"]` receives the counts of each.

    Args:
        teacher: generates, in the runtime of its format.
        settings: num_beams, best_of, original_ratio.
        ctx: the training samples; generated texts are cached in the store.
    """
    split = ctx.data["train"]
    texts = ctx.cached_value(
        {
            "what": "sequences",
            "version": GENERATION_VERSION,
            "artifact": teacher.key,
            "settings": settings.model_dump(mode="json", exclude={"original_ratio", "generator", "tokenize"}),
            "tokenize": _bleu_tokenizer(teacher, split, settings) if settings.best_of else None,
            "rows": split.fingerprint if settings.best_of else json_hash([e.text for e in split.examples]),
        },
        lambda: _generate(teacher, split, settings, ctx),
    )
    taught = [replace(e, references=(text,)) for e, text in zip(split.examples, texts, strict=True) if text]
    own, written = count_targets(len(split), len(taught), settings.original_ratio)
    draw = random.Random(ctx.seed)
    kept = [split.examples[i] for i in sorted(draw.sample(range(len(split)), own))]
    chosen = [taught[i] for i in sorted(draw.sample(range(len(taught)), written))]
    ctx.details["sequence_level"] = {"written_by_the_teacher": written, "with_their_own_target": own}
    if lost := len(split) - len(taught):
        ctx.warn(
            "empty-teacher-outputs",
            f"sequence_level: the teacher generated an empty output for {lost} of {len(split)} samples;"
            " they are not used.",
        )
    return Split(split.origin, (*chosen, *kept))


def count_targets(rows: int, num_generated: int, original_ratio: float) -> tuple[int, int]:
    """Return the numbers of samples with their own target and with a generated one, as many as possible.

    Args:
        rows: number of samples.
        num_generated: number of samples with a generated target that is not empty.
        original_ratio: fraction of samples with their own target, below 1.
    """
    own = min(rows, round(num_generated * original_ratio / (1 - original_ratio)))
    return own, num_generated if original_ratio == 0 else min(
        num_generated, round(own * (1 - original_ratio) / original_ratio)
    )


def _bleu_tokenizer(teacher: Artifact, split: Split, settings: SequenceSettings) -> str:
    texts = (text for example in split.examples for text in example.references)
    return bleu_tokenizer(texts, settings.tokenize, read_text_rules(teacher.path).target_language)


def _generate(teacher: Artifact, split: Split, settings: SequenceSettings, ctx: Context) -> list[str]:
    from smelt.runtime.backends.open_runner import open_runner
    from smelt.runtime.generate.settings import GenerationSettings
    from smelt.runtime.predict_texts import generate_candidates, generate_texts

    said: dict[str, Any] = {"num_beams": settings.num_beams, "max_new_tokens": settings.max_new_tokens}
    if settings.num_beams > 1:
        said["length_penalty"] = settings.length_penalty
    generation, texts = GenerationSettings(**said), [e.text for e in split.examples]
    device = "cpu" if ctx.device == "cpu" else "auto"
    with open_runner(teacher, ctx.threads, device) as runner:
        if settings.best_of is None:
            return generate_texts(runner, texts, generation, settings.batch_size, ctx.progress)
        found = generate_candidates(
            runner, texts, generation, settings.best_of, settings.batch_size, ctx.progress
        )
    tokenize = _bleu_tokenizer(teacher, split, settings)
    return [
        closest_by_bleu(e.references, candidates, tokenize)
        for e, candidates in zip(split.examples, found, strict=True)
    ]


def closest_by_bleu(references: Sequence[str], candidates: Sequence[str], tokenize: str = "13a") -> str:
    """Return the candidate with the highest sentence BLEU; the first of equals."""
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(effective_order=True, tokenize=tokenize)
    return max(candidates, key=lambda text: bleu.sentence_score(text, list(references)).score)
