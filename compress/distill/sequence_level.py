"""Select the targets of the training samples: their own, or those that a teacher generates.

Sequence-level distillation, Kim & Rush 2016, arXiv:1606.07947: the teacher decodes the sources of the
training samples with beam search, and the student trains on the result (Seq-KD), or on the candidate that is
closest to the reference (Seq-Inter). For unlabelled samples the teacher's outputs are the only targets.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from smelt.compress.distill.settings import DistillSettings, SequenceSettings
from smelt.core.artifact import Artifact
from smelt.core.files import json_hash
from smelt.core.messages import Message, error_message
from smelt.core.stage import Context, Need
from smelt.data.bleu_tokenizer import bleu_tokenizer
from smelt.data.examples import UNLABELLED, UNLABELLED_TASKS
from smelt.data.labels import MULTI_LABEL, REGRESSION, problem_type
from smelt.data.splits import SENTENCE_SIMILARITY, Example, Label, Split, Task
from smelt.models.text_rules import read_text_rules

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
    from smelt.generation.config import GenerationSettings
    from smelt.runtimes.predict_texts import generate_candidates, generate_texts
    from smelt.runtimes.registry import open_runner

    options: dict[str, Any] = {"num_beams": settings.num_beams, "max_new_tokens": settings.max_new_tokens}
    if settings.num_beams > 1:
        options["length_penalty"] = settings.length_penalty
    generation, texts = GenerationSettings(**options), [e.text for e in split.examples]
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


def needed_splits(settings: DistillSettings) -> frozenset[Need]:
    """Return the data splits that the training needs."""
    found: dict[str, frozenset[Need]] = {
        "labelled": frozenset({"train"}),
        "unlabelled": frozenset({"unlabelled"}),
        "both": frozenset({"train", "unlabelled"}),
    }
    return found[settings.train_on]


def check_unlabelled(settings: DistillSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
    """Return the mistakes, each with its setting, of losses that need labels on unlabelled samples."""
    if settings.train_on == "labelled":
        return []
    if task not in UNLABELLED_TASKS:
        tasks = " and ".join(sorted(UNLABELLED_TASKS))
        text = f"unlabelled samples are supported for {tasks}, not for {task}; remove train_on."
        return [error_message("does-not-fit-task", text, setting="train_on")]
    found = []
    origin = data[UNLABELLED].origin if UNLABELLED in data else f"data: {UNLABELLED}"
    for number, training in enumerate(settings.phase_settings()):
        place = "losses" if settings.phases is None else f"phases.{number}.losses"
        part = "cosent" if task == SENTENCE_SIMILARITY else "labels"
        weight = (
            training.losses.vector_weights()["cosent"]
            if task == SENTENCE_SIMILARITY
            else training.losses.labels
        )
        if weight:
            teaches = task == SENTENCE_SIMILARITY or training.losses.uses_teacher()
            remedy = f"losses: {{{part}: 0}}, which keeps" if teaches else "losses: {logits: 1.0}, which is"
            found.append(
                error_message(
                    "missing-scores" if task == SENTENCE_SIMILARITY else "missing-labels",
                    f"the weight of this loss is {weight:g}, but the samples of {origin} have no"
                    f" {part}. Set {remedy} the loss on the teacher's outputs.",
                    setting=f"{place}.{part}",
                )
            )
    return found


def with_training_samples(settings: DistillSettings, config: Any, ctx: Context) -> Context:
    """Return `ctx` with the training samples that the settings select.

    Each sample without a label gets a dummy label that no loss uses. If pairs and single texts are combined
    for a sentence embedder, the pairs are split into single texts.
    """
    if settings.train_on == "labelled":
        return ctx
    names = ("train", UNLABELLED) if settings.train_on == "both" else (UNLABELLED,)
    splits = [ctx.data[name] for name in names]
    examples = [example for split in splits for example in split.examples]
    if ctx.task == SENTENCE_SIMILARITY:
        if len({example.text_pair is None for example in examples}) == 2:
            examples = [single for example in examples for single in _split_pair(example)]
        examples = [replace(example, label=None) for example in examples]
    else:
        unread = _placeholder_label(config)
        examples = [replace(example, label=unread) for example in examples]
    rows = Split(" and ".join(split.origin for split in splits), tuple(examples))
    ctx.details["rows"] = {split.origin: len(split) for split in splits}
    return replace(ctx, data={**ctx.data, "train": rows})


def _placeholder_label(config: Any) -> Label:
    problem = problem_type(config.to_dict())
    if problem == REGRESSION:
        return 0.0
    return () if problem == MULTI_LABEL else str(config.id2label[0])


def _split_pair(example: Example) -> list[Example]:
    """Return the texts of a pair as separate examples."""
    texts = [example.text] + ([] if example.text_pair is None else [example.text_pair])
    return [replace(example, text=text, text_pair=None) for text in texts]
