"""Settings shared by all training stages; without torch, so that the table of stages loads quickly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from smelt.compress.drop_layers.settings import check_part_kinds
from smelt.compress.prune.learned_settings import LearnedMasksSettings
from smelt.compress.quantize.qat_settings import QatSettings
from smelt.compress.sparsify.settings import GradualSparsitySettings
from smelt.core.errors import SettingError
from smelt.core.messages import Message, error_message
from smelt.core.stage import Need, Settings, StoredDtype
from smelt.models.families.registry import no_blocks_reason

LOSS_METRIC = "loss"  # the default of `metric_for_best_model`
PEFT_VERSION = "0.18"  # the oldest supported release
# Oldest supported releases, as in the extra `trackers`.
TRACKER_VERSIONS = {"tensorboard": "2.18", "wandb": "0.18", "swanlab": "0.5"}


class LoraSettings(Settings):
    """Low-rank adapters that train instead of the weights and are merged into them."""

    rank: int = Field(default=16, ge=1, description="rank of each adapter")
    alpha: int = Field(default=32, ge=1, description="adapters are scaled by alpha / rank")
    targets: tuple[Literal["attention", "ffn"], ...] = Field(
        default=("attention", "ffn"),
        min_length=1,
        description="linear layers that get adapters",
    )


class TrainingSettings(Settings):
    """Settings of every stage that trains.

    A batch is `batch_size` samples, or as many as fit `max_tokens_per_batch`. Samples of similar length share
    a batch, because a CPU computes padding at full cost.
    """

    epochs: float = Field(default=3.0, gt=0, description="passes over the training samples")
    max_steps: int | None = Field(default=None, ge=1, description="number of updates; overrides epochs")
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="peak learning rate of AdamW; default: by family, width and what is trained",
    )
    lr_schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="shape of the learning rate after the warm-up"
    )
    warmup: float = Field(
        default=0.06, ge=0, description="number of updates if 1 or more, else a fraction of all updates"
    )
    batch_size: int = Field(default=32, ge=1, description="samples per batch")
    max_tokens_per_batch: int | None = Field(
        default=None, ge=1, description="instead of batch_size: tokens per batch, source, target and padding"
    )
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="batches per update")
    weight_decay: float = Field(default=0.01, ge=0, description="not for biases and norms")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="weight of the uniform distribution in the targets"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this norm")
    dropout: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="replaces all dropout rates of the model; `distill` with only the logits loss: default 0",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="auto: bf16 if a trial measures a gain",
    )
    max_length: int | None = Field(
        default=None, ge=2, description="texts are truncated to this many tokens; default: the model's limit"
    )
    num_evals: int = Field(
        default=4,
        ge=0,
        description="validations during training; 0: the last weights are kept",
    )
    max_validation_samples: int = Field(
        default=1000,
        ge=1,
        description="validation samples used, spread over the file",
    )
    metric_for_best_model: str = Field(
        default=LOSS_METRIC,
        description="loss, or a metric of score.quality",
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of a moving average that replaces the weights",
    )
    lora: LoraSettings | None = Field(
        default=None,
        description="train low-rank adapters instead of all weights",
    )
    sparsify: GradualSparsitySettings | None = Field(
        default=None, description="set single weights to zero during training"
    )
    learned_masks: LearnedMasksSettings | None = Field(
        default=None,
        description="learn which units to remove",
    )
    qat: QatSettings | None = Field(default=None, description="quantization-aware training, after `quantize`")
    dtype: StoredDtype = "keep"
    checkpoint_interval_minutes: float | None = Field(
        default=5.0,
        ge=0,
        exclude=True,  # it does not change the result, so it is not part of the key
        description="0: after each update; null: no checkpoints",
    )
    report_to: list[Literal["tensorboard", "wandb", "swanlab"]] = Field(
        default=[],
        exclude=True,  # it does not change the result, so it is not part of the key
        description="experiment trackers",
    )

    @property
    def changes_quantized_weights(self) -> bool:
        """Whether training changes the quantized weights; adapters do not."""
        return self.lora is None

    @property
    def saves_master_weights(self) -> bool:
        """Whether the float master weights of quantized layers are saved."""
        return self.qat is None or self.qat.save_master_weights

    def required_packages(self) -> dict[str, str]:
        """Return peft if there are adapters, and the trackers."""
        adapters = {} if self.lora is None else {"peft": PEFT_VERSION}
        return adapters | {name: TRACKER_VERSIONS[name] for name in self.report_to}

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if self.metric_for_best_model != LOSS_METRIC and not self.num_evals:
            raise SettingError(
                f"metric_for_best_model: {self.metric_for_best_model[:60]} requires validations during"
                " training; set num_evals to 1 or more",
                code="no-evaluation",
            )
        if self.lora is not None and self.qat is not None:
            raise SettingError(
                "lora does not train the quantized weights, so qat has no effect; remove qat or lora",
                code="settings-conflict",
            )
        changing = [word for word in ("sparsify", "learned_masks") if getattr(self, word) is not None]
        if len(changing) + (self.lora is not None) > 1:
            raise SettingError(
                "set only one of lora, sparsify and learned_masks",
                code="settings-conflict",
            )
        return self


def needed_by_training(settings: TrainingSettings) -> frozenset[Need]:
    """Return the data that a training needs: training samples; validation samples if a metric selects."""
    return frozenset({"train"} if settings.metric_for_best_model == LOSS_METRIC else {"train", "validation"})


def provided_by_training(settings: TrainingSettings) -> frozenset[str]:
    """Return what later steps may lose of a training, or cannot process."""
    masks = settings.learned_masks
    found = {
        "widths": masks and set(masks.targets) - {"width"},
        "parts": masks and masks.parts,
        "zeros": settings.sparsify,
    }
    return frozenset({"training", *(word for word, provided in found.items() if provided)})


def invalidated_by_training(settings: TrainingSettings) -> Mapping[str, str]:
    """Return what a training loses of earlier steps."""
    if settings.lora is not None:  # next to quantized weights, which are not changed
        return {}
    units = {
        "pattern": "removed inputs shift their neighbours, and the n:m pattern of '{step}' is lost;"
        " remove units before '{step}'"
    }
    return (units if settings.learned_masks is not None and settings.learned_masks.targets else {}) | {
        "codes": "training updates float weights and rounds them at the end, so the weights that '{step}'"
        " calibrated are lost; train with lora, which does not change them, or remove method in"
        " '{step}'"
    }


def check_training(settings: TrainingSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return the mistakes, each with its setting, of techniques that do not apply to a model.

    config: the Hugging Face config of the step's input model, as a dict.
    """
    lack = no_blocks_reason(config)
    words = [word for word in ("lora", "sparsify", "learned_masks") if getattr(settings, word) is not None]
    if lack:
        return [
            error_message("does-not-fit-model", f"{lack}; remove it to train all weights.", setting=word)
            for word in words
        ]
    masks = settings.learned_masks
    return check_part_kinds(masks.parts if masks is not None else (), config, "learned_masks.parts")
