"""The settings that all training stages share; no torch, so that the table of stages is quick to read.

What changes besides weights has its settings where it is done: zeros in `sparsify/`, masks in
`prune/learned/`, codes in `quantize/training/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smelt.compress.depth.fit import check_kinds
from smelt.compress.prune.learned.settings import MasksSettings
from smelt.compress.quantize.training.settings import CodesSettings
from smelt.compress.sparsify.while_training_settings import SparsitySettings
from smelt.core.errors import SettingError
from smelt.core.messages import Message, mistake
from smelt.core.stage import Need, Settings, StoredDtype
from smelt.families.registry import blockless

LOSS = "loss"  # what `select` says where no metric decides
PEFT = "0.18"  # the oldest release whose adapters are taken
# Oldest releases, as the extra `trackers` has them.
TRACKERS = {"tensorboard": "2.18", "wandb": "0.18", "swanlab": "0.5"}


class LoraSettings(Settings):
    """Low-rank adapters that train instead of the weights, and become part of them."""

    rank: int = Field(default=16, ge=1, description="of each adapter: its inner width")
    alpha: int = Field(default=32, ge=1, description="what an adapter gives counts alpha / rank")
    targets: tuple[Literal["attention", "ffn"], ...] = Field(
        default=("attention", "ffn"), min_length=1, description="whose linear layers, in each block"
    )


class TrainingSettings(Settings):
    """Settings of every stage that trains.

    Length is `epochs` (may be a fraction) unless `max_steps` is given. A batch is `batch_size` rows,
    or as many rows as fit `tokens_per_batch` padded source plus target tokens. Rows of similar
    length share a batch, because a CPU computes padding at full price.
    """

    epochs: float = Field(default=3.0, gt=0, description="passes over the training rows; may be a fraction")
    max_steps: int | None = Field(default=None, ge=1, description="number of updates; wins over epochs")
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="highest learning rate of AdamW; by family, width and what trains, unless given",
    )
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
        default=None,
        ge=0,
        lt=1,
        description="instead of every dropout that the model has; 0 in `distill` where logits alone teach",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="auto: bf16 autocast where a trial says that it is 1.3 times as fast"
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
    lora: LoraSettings | None = Field(
        default=None, description="train low-rank adapters, which are merged before storing; else all weights"
    )
    sparsify: SparsitySettings | None = Field(
        default=None, description="weights that become zero, step by step, while the others train"
    )
    masks: MasksSettings | None = Field(
        default=None,
        description="learn which heads, neurons, channels and parts of layers stay while the weights train,"
        " and cut the others",
    )
    codes: CodesSettings | None = Field(
        default=None, description="how a quantized model trains through its codes; else as by default"
    )
    dtype: StoredDtype = "keep"
    checkpoint_minutes: float | None = Field(
        default=5.0,
        ge=0,
        exclude=True,  # it changes no result, and so no key
        description="minutes between checkpoints, from which a run that was stopped goes on; 0: after each"
        " update; null: none",
    )
    report_to: list[Literal["tensorboard", "wandb", "swanlab"]] = Field(
        default=[],
        exclude=True,  # it changes no result, and so no key
        description="experiment trackers that the loss is sent to",
    )

    # Settings that came later: where one is as it is by default, it is not written down, and changes no key.
    unsaid: ClassVar[frozenset[str]] = frozenset({"lora", "sparsify", "masks", "codes"})

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        plain = {name: type(self).model_fields[name].default for name in self.unsaid}
        return {name: value for name, value in found.items() if name not in plain or value != plain[name]}

    @property
    def moves_codes(self) -> bool:
        """Whether it moves the codes of a quantized model: adapters train beside codes that stay."""
        return self.lora is None

    @property
    def keeps_weights(self) -> bool:
        """Whether the float weights behind codes are kept."""
        return self.codes is None or self.codes.keep_weights

    def packages(self) -> dict[str, str]:
        """Return peft where there are adapters, and the trackers."""
        adapters = {} if self.lora is None else {"peft": PEFT}
        return adapters | {name: TRACKERS[name] for name in self.report_to}

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if self.select != LOSS and not self.evals:
            raise SettingError(
                f"select: {self.select[:60]} chooses among validations; evals must be above 0",
                code="no-evaluation",
            )
        if self.lora is not None and self.codes is not None:
            raise SettingError(
                "with lora codes stay as they are: leave out codes, or lora", code="settings-conflict"
            )
        changing = [word for word in ("sparsify", "masks") if getattr(self, word) is not None]
        if len(changing) + (self.lora is not None) > 1:
            raise SettingError(
                "give one of lora, sparsify and masks: with adapters the weights that would go stand still",
                code="settings-conflict",
            )
        return self


def training_needs(settings: TrainingSettings) -> frozenset[Need]:
    """Return what a stage that trains needs: rows to learn from; where a metric chooses, some to score."""
    return frozenset({"train"} if settings.select == LOSS else {"train", "validation"})


def left_by_training(settings: TrainingSettings) -> frozenset[str]:
    """Return what a stage that trains leaves that later ones may lose, or cannot work with."""
    masks = settings.masks
    found = {
        "widths": masks and set(masks.what) - {"width"},
        "parts": masks and masks.parts,
        "zeros": settings.sparsify,
    }
    return frozenset({"training", *(word for word, said in found.items() if said)})


def lost_by_training(settings: TrainingSettings) -> Mapping[str, str]:
    """Return what a stage that trains loses of the work of steps before it."""
    if settings.lora is not None:  # beside codes, which stay as they are
        return {}
    units = {
        "pattern": "inputs that go move their neighbours, and the n:m pattern of '{step}' no longer holds;"
        " cut units before '{step}'"
    }
    return (units if settings.masks is not None and settings.masks.what else {}) | {
        "codes": "training goes on from float weights and ends at the codes nearest to them, so that those"
        " which '{step}' chose with care are lost; train with lora, which leaves them as they are, or leave"
        " method out in '{step}'"
    }


def check_training(settings: TrainingSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return what is wrong, with its setting, where what changes besides weights is nothing that a model has.

    config: the Hugging Face config of the model that the step gets, as a dict.
    """
    lack = blockless(config)
    words = [word for word in ("lora", "sparsify", "masks") if getattr(settings, word) is not None]
    if lack:
        return [
            mistake("does-not-fit-model", f"{lack}; leave it out, which trains all weights.", setting=word)
            for word in words
        ]
    return check_kinds(settings.masks.parts if settings.masks is not None else (), config, "masks.parts")
