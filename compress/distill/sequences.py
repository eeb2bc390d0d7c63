"""Targets that a teacher wrote: sequence-level distillation.

Kim & Rush 2016, Sequence-Level Knowledge Distillation, arXiv:1606.07947: the teacher decodes the sources of
the training rows with a beam, and the student trains on that (Seq-KD); of several candidates the one that is
most like the reference may be taken (Seq-Inter).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smelt.compress.distill.settings import SequenceSettings
from smelt.core.artifact import Artifact
from smelt.core.data import Split
from smelt.core.files import hash_of
from smelt.core.scripts import bleu_tokenizer
from smelt.core.stage import Context
from smelt.runtime.text.rules import read_text_rules

VERSION = 1  # raised whenever the same settings give other texts


def taught_rows(teacher: Artifact, settings: SequenceSettings, ctx: Context) -> Split:
    """Return the training rows with the teacher's texts for targets, `original_ratio` of them with their own.

    `ctx.details["sequence_level"]` gets how many there are of each.

    Args:
        teacher: decodes, in the runtime of its format.
        settings: beams, candidates, mix.
        ctx: the rows; what was decoded is kept beside the artifacts.
    """
    split = ctx.data["train"]
    texts = ctx.kept(
        {
            "what": "sequences",
            "version": VERSION,
            "artifact": teacher.key,
            "settings": settings.model_dump(mode="json", exclude={"original_ratio", "generator", "tokenize"}),
            "tokenize": _tokenizer(teacher, split, settings) if settings.best_of else None,
            "rows": split.fingerprint if settings.best_of else hash_of([e.text for e in split.examples]),
        },
        lambda: _decode(teacher, split, settings, ctx),
    )
    taught = [replace(e, references=(text,)) for e, text in zip(split.examples, texts, strict=True) if text]
    own, written = shares(len(split), len(taught), settings.original_ratio)
    draw = random.Random(ctx.seed)
    kept = [split.examples[i] for i in sorted(draw.sample(range(len(split)), own))]
    chosen = [taught[i] for i in sorted(draw.sample(range(len(taught)), written))]
    ctx.details["sequence_level"] = {"written_by_the_teacher": written, "with_their_own_target": own}
    if lost := len(split) - len(taught):
        ctx.warn(
            "empty-teacher-outputs",
            f"sequence_level: the teacher generated an empty output for {lost} of {len(split)} samples;"
            f" they are"
            " not used.",
        )
    return Split(split.origin, (*chosen, *kept))


def shares(rows: int, written: int, mix: float) -> tuple[int, int]:
    """Return how many rows keep their own target, and how many get the teacher's: as many as can be.

    Args:
        rows: there are.
        written: of which the teacher wrote something.
        mix: the fraction that keeps its own, below 1.
    """
    own = min(rows, round(written * mix / (1 - mix)))
    return own, written if mix == 0 else min(written, round(own * (1 - mix) / mix))


def _tokenizer(teacher: Artifact, split: Split, settings: SequenceSettings) -> str:
    texts = (text for example in split.examples for text in example.references)
    return bleu_tokenizer(texts, settings.tokenize, read_text_rules(teacher.path).target_language)


def _decode(teacher: Artifact, split: Split, settings: SequenceSettings, ctx: Context) -> list[str]:
    from smelt.runtime.backends.open_runner import open_runner
    from smelt.runtime.generate.settings import Generation
    from smelt.runtime.predict import generate_candidates, generate_texts

    said: dict[str, Any] = {"num_beams": settings.num_beams, "max_new_tokens": settings.max_new_tokens}
    if settings.num_beams > 1:
        said["length_penalty"] = settings.length_penalty
    generation, texts = Generation(**said), [e.text for e in split.examples]
    device = "cpu" if ctx.device == "cpu" else "auto"
    with open_runner(teacher, ctx.threads, device) as runner:
        if settings.best_of is None:
            return generate_texts(runner, texts, generation, settings.batch_size, ctx.progress)
        found = generate_candidates(
            runner, texts, generation, settings.best_of, settings.batch_size, ctx.progress
        )
    tokenize = _tokenizer(teacher, split, settings)
    return [
        nearest_to(e.references, candidates, tokenize)
        for e, candidates in zip(split.examples, found, strict=True)
    ]


def nearest_to(references: Sequence[str], candidates: Sequence[str], tokenize: str = "13a") -> str:
    """Return the candidate with the highest sentence BLEU; the first of equal ones."""
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(effective_order=True, tokenize=tokenize)
    return max(candidates, key=lambda text: bleu.sentence_score(text, list(references)).score)
