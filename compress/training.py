"""What all training stages share: their settings and `train`, one call for the whole of it.

The loop itself is `transformers.Trainer` (compress/training_loop.py); this module imports no torch,
so that the table of stages is quick to read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from smelt.core.artifact import Artifact
from smelt.core.data import SplitName
from smelt.core.errors import InputError
from smelt.core.stage import Context, Settings

if TYPE_CHECKING:
    from smelt.compress.training_data import Row
    from smelt.compress.training_loop import Objective
    from smelt.runtime.structure import Edit


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
    dropout: float | None = Field(default=None, ge=0, lt=1, description="instead of the model's own")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="auto: bf16 autocast where the processor multiplies bf16 natively"
    )
    max_length: int | None = Field(default=None, ge=2, description="texts are cut to so many tokens")
    evals: int = Field(
        default=4, ge=0, description="validations per run; the best checkpoint is kept (0: the last)"
    )
    validation_rows: int = Field(default=1000, ge=1, description="at most so many rows per validation")
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of a moving average that replaces the weights",
    )
    report_to: list[Literal["tensorboard", "wandb", "swanlab"]] = Field(
        default=[], description="experiment trackers that the loss is sent to"
    )


def load_float(src: Artifact, stage: str) -> tuple[Any, list[Edit]]:
    """Return the model of `src` (float32, CPU, eval mode) and its edits.

    Raises:
        InputError: the model is quantized; its integer codes have no gradient and no spectrum.
    """
    from smelt.runtime.checkpoint import load_model
    from smelt.runtime.structure import read_edits

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
    stage: str = "finetune",
) -> None:
    """Train `model` in place on `ctx.data["train"]`; afterwards it is float32, on the CPU, in eval mode.

    Args:
        model: a translation or classification model of transformers, its structure already edited.
        src: where the tokenizer lies.
        settings: length, batches, optimizer.
        ctx: data, seed, progress; gets the facts (`train_loss`, `validation_loss`, `best_step`,
            `steps`, `precision`) and the warnings (rows that were cut).
        objective: what is minimised; cross-entropy with the labels unless given.
        stage: the stage's word, for messages.

    Raises:
        InputError: no training rows, or a label that the model does not know.
        RunError: the loss became infinite or not a number.
    """
    from smelt.compress.training_data import encode_split
    from smelt.compress.training_loop import label_objective, run_training
    from smelt.runtime.checkpoint import load_tokenizer

    if "train" not in ctx.data:
        raise InputError(f"{stage}: needs training rows. Name them with data: {{train: FILE}}.")
    tokenizer, limit = load_tokenizer(src.path), settings.max_length

    def encode(name: SplitName, rows: int | None = None) -> list[Row]:
        what = f"{stage}: {name}"
        return encode_split(
            ctx.data[name].head(rows), model.config, tokenizer, ctx, max_length=limit, what=what
        )

    rows = encode("train")
    validation = None
    if settings.evals and "validation" in ctx.data:
        validation = encode("validation", settings.validation_rows)
    if objective is None:
        objective = label_objective(settings.label_smoothing)
    run_training(model, rows, validation, objective=objective, settings=settings, ctx=ctx)
