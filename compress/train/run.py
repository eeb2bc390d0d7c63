"""What all training stages share: `train`, one call for the whole of it.

The loop itself is `transformers.Trainer` (compress/train/loop.py); this module imports no torch,
so that the table of stages is quick to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from smelt.compress.prune.fit import OF_VECTORS
from smelt.compress.train.settings import LOSS, TrainingSettings
from smelt.core.artifact import Artifact
from smelt.core.data import CLASSIFICATION, SIMILARITY, Split, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, mistake
from smelt.core.stage import Context

if TYPE_CHECKING:
    from smelt.compress.train.data import Row
    from smelt.compress.train.extension import Extension, WhileTraining
    from smelt.compress.train.lora import Adapters
    from smelt.compress.train.stored.rounding import Rounding
    from smelt.compress.train.terms import Objective
    from smelt.runtime.models.structure import Edit


def scores_lacking(task: Task, data: Mapping[str, Split], names: Sequence[str]) -> list[Message]:
    """Return what is wrong where a sentence embedder is to learn from pairs without scores.

    names: of the splits that are asked, as far as they are in `data`.
    """
    lack = [data[name] for name in names if name in data and not data[name].labelled]
    return [mistake("missing-scores", no_scores(lack[0]))] if task == SIMILARITY and lack else []


def masks_unfit(settings: TrainingSettings, task: Task) -> list[Message]:
    """Return what is wrong where channels have masks and the hidden states are the outputs."""
    narrows = settings.learned_masks is not None and "width" in settings.learned_masks.targets
    return (
        [mistake("fixed-width", OF_VECTORS, setting="learned_masks.targets")]
        if narrows and task == SIMILARITY
        else []
    )


def no_scores(split: Split) -> str:
    """Return the sentence that says that the rows of `split` have no scores."""
    return (
        f"the rows of {split.origin} have no scores (column 'label'), and the loss is made of them. Take"
        " pairs with scores; distill with losses: {sentence_embedding: 1.0, pairwise_similarity: 1.0} needs"
        " only texts."
    )


def train(
    model: Any,
    src: Artifact,
    settings: TrainingSettings,
    ctx: Context,
    *,
    objective: Objective | None = None,
    edits: list[Edit] | None = None,
    stage: str = "finetune",
    extension: Extension | None = None,
    random: bool | None = None,
) -> None:
    """Train `model` in place on `ctx.data["train"]`; afterwards it is float32, on the CPU, in eval mode.

    Args:
        model: of transformers or a sentence embedder, its structure already edited.
        src: where the tokenizer lies.
        settings: length, batches, optimizer.
        ctx: data, seed, progress; gets the details (`train_loss`, `validation_loss`, `kept_step`,
            `steps`, `precision`, `validations`; `train_losses` where the loss has parts) and the
            warnings (rows that were cut, a training that gave nothing).
        objective: what is minimised; unless given the loss with the labels, or with the scores of pairs.
        edits: the model's structure, with which a checkpoint is stored to be scored
        (`metric_for_best_model`); gets the
            adapters that stay beside codes, and the cuts of learned masks.
        stage: the stage's word, for messages.
        extension: what the technique adds.
        random: whether weights or head are random, so that the model as it came is nothing to keep; None
            looks at where `src` came from.

    Raises:
        InputError: no training rows, no validation rows to select by, or a label that the model does
            not know.
        RunError: the loss became infinite or not a number.
    """
    from smelt.compress.quantize.through_codes import incoming, take_training
    from smelt.compress.train.data import encode_split, reader_of, spread_out
    from smelt.compress.train.extension import Extension, both
    from smelt.compress.train.loop import run_training
    from smelt.compress.train.objective import label_objective
    from smelt.compress.train.stored.rounding import Rounding
    from smelt.compress.train.stored.score import CheckpointScore

    _require_rows(settings, ctx, stage, scores=objective is None)
    tokenizer = reader_of(src.path)

    def encode(split: Split, name: str) -> list[Row]:
        return encode_split(split, model.config, tokenizer, ctx, max_length=settings.max_length, what=name)

    rows = encode(ctx.data["train"], "train")
    validation, score, probe = None, None, None
    if settings.num_evals and (split := ctx.data.get("validation")):
        windows = ctx.task == "language-modeling"  # of one text, which is cut before any are chosen
        if not windows:
            split = split.some(spread_out(len(split), settings.max_validation_samples, ctx.seed))
        validation = encode(split, "validation")
        if windows:
            validation = [
                validation[i] for i in spread_out(len(validation), settings.max_validation_samples, ctx.seed)
            ]
        probe = CheckpointScore(model, [] if edits is None else edits, src, split, settings, ctx)
        score = None if settings.metric_for_best_model == LOSS else probe
        # of texts a score takes a generation; of classes one pass over the rows
        probe = probe if settings.metric_for_best_model == LOSS and ctx.task in CLASSIFICATION else None
    elif settings.metric_for_best_model != LOSS:
        raise InputError(
            f"{stage}: metric_for_best_model: {settings.metric_for_best_model} needs validation rows. Name"
            f" them with data: {{validation:"
            " FILE}.",
            code="missing-data",
            setting="data.validation",
        )
    rounding = Rounding(model, src.path, settings.lora is not None) if settings.dtype == "keep" else None
    techniques = _while_training(model, settings, [] if edits is None else edits, stage)
    objective = objective or label_objective(settings.label_smoothing)
    for technique in techniques:
        objective = technique.objective(objective)
        extension = both(extension or Extension(), technique.extension())
    adapters = _adapters(model, settings, edits, ctx)
    extension = extension or Extension()
    rows, validation = extension.rows(rows, validation)
    if starts_random(src, ctx) if random is None else random:
        extension = replace(extension, eligible=partial(_trained, extension.eligible))
    if adapters is not None:
        extension = replace(extension, stored=adapters.stored)
    extension = replace(extension, incoming=partial(incoming, model))
    run_training(
        model,
        rows,
        validation,
        objective=objective,
        settings=settings,
        ctx=ctx,
        score=score,
        probe=None if probe is None else probe.scores,
        extension=extension,
        src=src,
    )
    if ctx.details.get("training", {}).get("kept_step", 1):
        take_training(model)
    if adapters is not None:
        adapters.settle()
    if rounding is not None:
        _tell(rounding, ctx)
    for technique in techniques:
        technique.settle(ctx)


def starts_random(src: Artifact, ctx: Context) -> bool:
    """Return whether the weights or the head of `src` are random: drawn, and not trained since."""
    by_key = {artifact.key: artifact for artifact in ctx.ancestors.values()}
    current: Artifact | None = src
    while current is not None:
        details = current.manifest.details
        if "training" in details or "phases" in details:
            return False
        if details.get("untrained") or details.get("new_head"):
            return True
        current = by_key.get(current.manifest.parent or "")
    return False


def _trained(eligible: Callable[[int], bool], step: int) -> bool:
    return step > 0 and eligible(step)


def _require_rows(settings: TrainingSettings, ctx: Context, stage: str, scores: bool) -> None:
    """Refuse to train without rows, with pairs that lack the scores that are asked, or masks of vectors."""
    if "train" not in ctx.data:
        raise InputError(
            f"{stage}: needs training rows. Name them with data: {{train: FILE}}.",
            code="missing-data",
            setting="data.train",
        )
    if scores and (found := scores_lacking(ctx.task, ctx.data, ("train", "validation"))):
        raise InputError(f"{stage}: {found[0].message}", code=found[0].code)
    for one in masks_unfit(settings, ctx.task):
        raise InputError(f"{stage}: {one.setting}: {one.message}", code=one.code, setting=one.setting)


def _tell(rounding: Rounding, ctx: Context) -> None:
    """Say which part of what the training changed is lost when the weights are rounded to be stored."""
    if not rounding.before:
        return
    share = rounding.share()
    ctx.details["training"]["rounding"] = round(share, 5)
    if text := rounding.warning(share):
        ctx.warn("lost-in-rounding", text)


def _while_training(
    model: Any, settings: TrainingSettings, edits: list[Edit], stage: str
) -> list[WhileTraining]:
    """Begin the techniques that change the model while it trains, as far as they are asked for."""
    found: list[WhileTraining] = []
    if settings.sparsify is not None:
        from smelt.compress.sparsify.while_training import Gradual

        found.append(Gradual(model, settings.sparsify))
    if settings.learned_masks is not None:
        from smelt.compress.prune.learned.masks import LearnedMasks

        found.append(LearnedMasks(model, settings.learned_masks, edits))
    if settings.lora is None:
        from smelt.compress.quantize.training.binary_inputs import LearnedInputs, with_binary_inputs

        if with_binary_inputs(model):
            found.append(LearnedInputs(model, settings.qat))
    if settings.qat is not None and settings.qat.scales == "lsq":
        from smelt.compress.quantize.training.learned import LearnedSteps

        found.append(LearnedSteps(model, settings.qat, stage))
    return found


def _adapters(
    model: Any, settings: TrainingSettings, edits: list[Edit] | None, ctx: Context
) -> Adapters | None:
    """Put low-rank adapters on `model` where the settings ask for them, and tell the report."""
    if settings.lora is None:
        return None
    import torch

    from smelt.compress.train.lora import Adapters

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.seed)
        found = Adapters(model, settings.lora, edits)
    ctx.details["lora"] = found.details()
    ctx.warnings.extend(found.warnings())
    return found
