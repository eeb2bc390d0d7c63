"""The shared training of all training stages: `train` is the single entry point.

The loop itself is `transformers.Trainer` (smelt/training/trainer.py); this module imports no torch,
so that the table of stages loads quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import ADAPTER_FOLDER, Artifact
from smelt.core.errors import InputError
from smelt.core.process_group import process_rank
from smelt.data.splits import Split, missing_labels_errors, spread_indices
from smelt.stage import Context
from smelt.training.settings import LOSS_METRIC, TrainingSettings

if TYPE_CHECKING:
    from smelt.models.edits import Edit
    from smelt.tasks.samples import EncodedSample
    from smelt.training.checkpoints import RoundingCheck
    from smelt.training.extension import Objective, TrainingExtension, TrainingTechnique
    from smelt.training.lora import LoraAdapters


def train(
    model: Any,
    src: Artifact,
    settings: TrainingSettings,
    ctx: Context,
    *,
    objective: Objective | None = None,
    edits: list[Edit] | None = None,
    stage: str = "finetune",
    extension: TrainingExtension | None = None,
    techniques: Sequence[Callable[[], TrainingTechnique]] = (),
    random: bool | None = None,
) -> None:
    """Train `model` in place on `ctx.data["train"]`; afterwards it is float32, on the CPU, in eval mode.

    Args:
        model: of transformers or a sentence embedder, with its edits applied.
        src: the artifact with the tokenizer.
        settings: lengths, batches, optimizer.
        ctx: data, seed, progress; receives details (`train_loss`, `validation_loss`, `kept_step`,
            `steps`, `precision`, `validations`; `train_losses` if the loss has several terms) and
            warnings (truncated samples, a training without improvement).
        objective: the loss to minimize; by default the loss with the labels, or with the scores of pairs.
        edits: the model's edits, for storing checkpoints to score (`metric_for_best_model`); receives
            low-rank corrections of quantized layers, and the cuts of learned masks.
        stage: the name of the stage, for messages.
        extension: of the stage.
        techniques: each starts one that changes the model while it trains. In their order, their objectives
            wrap each other, the model is converted for storing, and they end.
        random: whether weights or output layer are random, so that the initial model is no candidate; None:
            derived from the history of `src`.

    Raises:
        InputError: no training samples, no validation samples to select by, or a label that the model
            lacks.
        RunError: the loss became infinite or NaN.
    """
    from smelt.tasks.encode_split import encode_split
    from smelt.tasks.samples import load_processor, pack_samples
    from smelt.training.checkpoints import CheckpointScorer, RoundingCheck
    from smelt.training.extension import TrainingExtension, combine_extensions
    from smelt.training.losses import label_objective
    from smelt.training.thresholds import set_label_thresholds
    from smelt.training.trainer import run_training

    require_training_samples(ctx, stage, labels=objective is None or settings.sampling == "balanced")
    tokenizer = load_processor(src.path)

    def encode(split: Split, name: str) -> list[EncodedSample]:
        return encode_split(
            split, model.config, tokenizer, ctx, max_length=settings.max_length, split_name=name
        )

    samples = encode(ctx.data["train"], "train")
    if settings.sampling == "balanced" and not all(isinstance(sample.target, int) for sample in samples):
        raise InputError(
            f"{stage}: sampling: balanced requires samples with one class each. Remove it.",
            code="not-one-class",
            setting="sampling",
        )
    validation, score, probe = None, None, None
    if settings.num_evals and (split := ctx.data.get("validation")):
        windows = ctx.traits.samples == "running-text"  # cut from one text before any are selected
        if not windows:
            split = split.select(spread_indices(len(split), settings.max_validation_samples, ctx.seed))
        validation = encode(split, "validation")
        if windows:
            validation = [
                validation[i]
                for i in spread_indices(len(validation), settings.max_validation_samples, ctx.seed)
            ]
        probe = CheckpointScorer(model, [] if edits is None else edits, src, split, settings, ctx)
        score = None if settings.metric_for_best_model == LOSS_METRIC else probe
        # a score needs generation for texts, one pass over the samples for classes
        probe = probe if settings.metric_for_best_model == LOSS_METRIC and ctx.traits.classifies else None
    elif settings.metric_for_best_model != LOSS_METRIC:
        raise InputError(
            f"{stage}: metric_for_best_model: {settings.metric_for_best_model} requires validation"
            f" samples. Add data: {{validation: FILE}}.",
            code="missing-data",
            setting="data.validation",
        )
    rounding = RoundingCheck(model, src.path, settings.lora is not None) if settings.dtype == "keep" else None
    begun = [begin() for begin in techniques]
    objective = objective or label_objective(settings.label_smoothing_factor)
    for technique in begun:
        objective = technique.objective(objective)
        extension = combine_extensions(extension or TrainingExtension(), technique.extension())
    adapters = _begin_lora(model, settings, edits, ctx)
    extension = extension or TrainingExtension()
    samples, validation = extension.prepare_samples(samples, validation)
    if settings.packing:
        samples = pack_samples(samples, settings.max_length)
        validation = None if validation is None else pack_samples(validation, settings.max_length)
    if starts_random(src, ctx) if random is None else random:
        extension = replace(extension, may_be_best=partial(_may_be_best_after_start, extension.may_be_best))
    if adapters is not None:
        extension = replace(extension, as_stored=adapters.as_stored)
    run_training(
        model,
        samples,
        validation,
        objective=objective,
        settings=settings,
        ctx=ctx,
        score=score,
        probe=None if probe is None else probe.scores,
        extension=extension,
        src=src,
    )
    if adapters is not None:
        _end_lora(adapters, ctx)
    if rounding is not None:
        _warn_of_rounding(rounding, ctx)
    for technique in begun:
        technique.finalize(ctx)
    set_label_thresholds(model, settings, ctx, partial(encode, name="validation"))


def starts_random(src: Artifact, ctx: Context) -> bool:
    """Return whether the weights or the output layer of `src` are random and not trained since."""
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


def _may_be_best_after_start(eligible: Callable[[int], bool], step: int) -> bool:
    return step > 0 and eligible(step)


def require_training_samples(ctx: Context, stage: str, *, labels: bool) -> None:
    """Require training samples, and their labels or scores of pairs if needed.

    Raises:
        InputError: `missing-data`, `missing-labels` or `missing-scores`.
    """
    if "train" not in ctx.data:
        raise InputError(
            f"{stage}: training samples are required. Add data: {{train: FILE}}.",
            code="missing-data",
            setting="data.train",
        )
    if labels and (errors := missing_labels_errors(ctx.task, ctx.data, ("train", "validation"))):
        raise InputError(f"{stage}: {errors[0].message}", code=errors[0].code)


def _warn_of_rounding(rounding: RoundingCheck, ctx: Context) -> None:
    """Report the part of the training that is lost by rounding to the stored dtype."""
    if not rounding.before:
        return
    lost_share = rounding.lost_share()
    ctx.details["training"]["rounding"] = round(lost_share, 5)
    if text := rounding.lost_share_text(lost_share):
        ctx.warn("lost-in-rounding", text)


def _begin_lora(
    model: Any, settings: TrainingSettings, edits: list[Edit] | None, ctx: Context
) -> LoraAdapters | None:
    """Add low-rank adapters to `model` if set, and report them."""
    if settings.lora is None:
        return None
    import torch

    from smelt.training.lora import LoraAdapters

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.seed)
        adapters = LoraAdapters(model, settings.lora, edits)
    ctx.details["lora"] = adapters.details()
    ctx.warnings.extend(adapters.warnings())
    return adapters


def _end_lora(adapters: LoraAdapters, ctx: Context) -> None:
    """Write the adapters if set; then they become part of the model."""
    if adapters.settings.save_adapter and not process_rank():  # of several processes, process 0 writes
        adapters.save(ctx.out / ADAPTER_FOLDER)
    adapters.finalize()
