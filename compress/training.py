"""What all training stages share: their settings and `train`, one call for the whole of it.

The loop itself is `transformers.Trainer` (compress/training_loop.py); this module imports no torch,
so that the table of stages is quick to read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from smelt.core.artifact import Artifact
from smelt.core.data import Split
from smelt.core.errors import InputError
from smelt.core.stage import Context, Need, Settings, StoredDtype

if TYPE_CHECKING:
    from smelt.compress.training_data import Row
    from smelt.compress.training_loop import Objective
    from smelt.runtime.models.structure import Edit

LOSS = "loss"  # what `select` says where no metric decides


class TrainingSettings(Settings):
    """Settings of every stage that trains.

    Length is `epochs` (may be a fraction) unless `max_steps` is given. A batch is `batch_size` rows,
    or as many rows as fit `tokens_per_batch` padded source plus target tokens. Rows of similar
    length share a batch, because a CPU computes padding at full price.
    """

    epochs: float = Field(default=1.0, gt=0, description="passes over the training rows; may be a fraction")
    max_steps: int | None = Field(default=None, ge=1, description="number of updates; wins over epochs")
    learning_rate: float = Field(default=1e-4, gt=0, description="highest learning rate of AdamW")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="how the learning rate falls after the warm-up"
    )
    warmup: float = Field(default=0.06, ge=0, description="steps if 1 or more, else fraction of all steps")
    batch_size: int = Field(default=32, ge=1, description="rows per update")
    tokens_per_batch: int | None = Field(
        default=None, ge=1, description="padded tokens (source and target) per update, instead of batch_size"
    )
    accumulate: int = Field(default=1, ge=1, description="batches per update, where memory is short")
    weight_decay: float = Field(default=0.01, ge=0, description="not applied to biases and norms")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="weight of the uniform distribution")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are scaled down to this norm")
    dropout: float | None = Field(
        default=None, ge=0, lt=1, description="instead of every dropout that the model has"
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="auto: bf16 autocast where the processor multiplies bf16 natively"
    )
    max_length: int | None = Field(default=None, ge=2, description="texts are cut to so many tokens")
    evals: int = Field(
        default=4,
        ge=0,
        description="validations after the first, which comes before training; the best checkpoint is kept"
        " (0: none, the last is kept)",
    )
    validation_rows: int = Field(
        default=1000,
        ge=1,
        description="at most so many rows (or windows) of the validation data, spread over it",
    )
    select: str = Field(
        default=LOSS,
        description="what the best checkpoint is best in: loss, or a metric of score.quality, for which each"
        " validation generates or classifies the validation rows",
    )
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of a moving average that replaces the weights",
    )
    dtype: StoredDtype = "keep"
    report_to: list[Literal["tensorboard", "wandb", "swanlab"]] = Field(
        default=[], description="experiment trackers that the loss is sent to"
    )

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if self.select != LOSS and not self.evals:
            raise ValueError(f"select: {self.select[:60]} chooses among validations; evals must be above 0")
        return self


def training_needs(settings: TrainingSettings) -> frozenset[Need]:
    """Return what a stage that trains needs: rows to learn from; where a metric chooses, some to score."""
    return frozenset({"train"} if settings.select == LOSS else {"train", "validation"})


def load_float(src: Artifact, stage: str) -> tuple[Any, list[Edit]]:
    """Return the model of `src` (float32, CPU, eval mode) and its edits.

    Raises:
        InputError: the model is quantized; its integer codes have no gradient and no spectrum.
    """
    from smelt.runtime.models.checkpoint import load_model
    from smelt.runtime.models.structure import read_edits

    if any(edit.get("op") == "quantize" for edit in read_edits(src.path)):
        raise InputError(
            f"{stage}: the model that it gets is quantized, and integer weights cannot be changed any more."
            f" Put '{stage}' before 'quantize' in the recipe."
        )
    return load_model(src.path)


def stored_parameters(model: Any) -> int:
    """Return how many values of `model` its file holds; fixed position tables are not stored."""
    fixed = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return sum(p.numel() for n, p in model.named_parameters() if n not in fixed)


def train(
    model: Any,
    src: Artifact,
    settings: TrainingSettings,
    ctx: Context,
    *,
    objective: Objective | None = None,
    edits: list[Edit] | None = None,
    stage: str = "finetune",
) -> None:
    """Train `model` in place on `ctx.data["train"]`; afterwards it is float32, on the CPU, in eval mode.

    Args:
        model: a translation or classification model of transformers, its structure already edited.
        src: where the tokenizer lies.
        settings: length, batches, optimizer.
        ctx: data, seed, progress; gets the facts (`train_loss`, `validation_loss`, `kept_step`,
            `steps`, `precision`, `validations`) and the warnings (rows that were cut, a training that
            gave nothing).
        objective: what is minimised; cross-entropy with the labels unless given.
        edits: the model's structure, with which a checkpoint is stored to be scored (`select`).
        stage: the stage's word, for messages.

    Raises:
        InputError: no training rows, no validation rows to select by, or a label that the model does
            not know.
        RunError: the loss became infinite or not a number.
    """
    from smelt.compress.training_data import encode_split, spread_out
    from smelt.compress.training_loop import label_objective, run_training
    from smelt.compress.training_rounding import Rounding
    from smelt.compress.training_score import CheckpointScore
    from smelt.runtime.models.checkpoint import load_tokenizer

    if "train" not in ctx.data:
        raise InputError(f"{stage}: needs training rows. Name them with data: {{train: FILE}}.")
    tokenizer = load_tokenizer(src.path)

    def encode(split: Split, name: str) -> list[Row]:
        return encode_split(
            split, model.config, tokenizer, ctx, max_length=settings.max_length, what=f"{stage}: {name}"
        )

    rows = encode(ctx.data["train"], "train")
    validation, score = None, None
    if settings.evals and (split := ctx.data.get("validation")):
        windows = ctx.task == "language-modeling"  # of one text, which is cut before any are chosen
        if not windows:
            split = split.some(spread_out(len(split), settings.validation_rows, ctx.seed))
        validation = encode(split, "validation")
        if windows:
            validation = [
                validation[i] for i in spread_out(len(validation), settings.validation_rows, ctx.seed)
            ]
        if settings.select != LOSS:
            score = CheckpointScore(model, edits or [], src, split, settings, ctx)
    elif settings.select != LOSS:
        raise InputError(
            f"{stage}: select: {settings.select} needs validation rows. Name them with data: {{validation:"
            " FILE}."
        )
    rounding = Rounding(model, src.path) if settings.dtype == "keep" else None
    run_training(
        model,
        rows,
        validation,
        objective=objective or label_objective(settings.label_smoothing),
        settings=settings,
        ctx=ctx,
        score=score,
        stage=stage,
    )
    if rounding is not None and rounding.before:
        share = rounding.share()
        ctx.facts["training"]["rounding"] = round(share, 5)
        if warning := rounding.warning(share):
            ctx.warnings.append(f"{stage}: {warning}")
