"""Settings and sizes of the training loop; without torch, so that the table of stages loads quickly.

They include the default learning rates: by family, width, and what is trained.

A weight that AdamW trains takes 16 bytes: itself, its gradient and two moments in float32 (Rajbhandari et al.
2020, ZeRO, arXiv:1910.02054, section 3.1, without the copy of mixed precision).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.core.artifact import Artifact
from smelt.core.errors import SettingError
from smelt.core.files import read_json_object
from smelt.core.messages import Message, error_message
from smelt.models.families.registry import find_family
from smelt.models.model_size import FLOAT_BYTES, INTERPRETER_BYTES, ModelSize, SizeInputs, StepSize
from smelt.stage import Context, Need, Settings, StoredDtype

LOSS_METRIC = "loss"  # the default of `metric_for_best_model`
PEFT_VERSION = "0.18"  # the oldest supported release
BITSANDBYTES_VERSION = "0.48"
# Of transformers' `OptimizerNames`: those that need no settings of their own and step inside the usual loop,
# with the bytes of their state per weight.
_TORCH_OPTIMIZERS = {
    "adafactor": 0, "adagrad": 4, "adamw_torch": 8, "adamw_torch_fused": 8, "rmsprop": 4, "sgd": 0,
}  # fmt: skip
_BITSANDBYTES_OPTIMIZERS = {
    "adamw_8bit": 2, "adamw_bnb_8bit": 2, "ademamix": 12, "ademamix_8bit": 3, "lion_32bit": 4, "lion_8bit": 1,
    "paged_adamw_32bit": 8, "paged_adamw_8bit": 2, "paged_ademamix_32bit": 12, "paged_ademamix_8bit": 3,
    "paged_lion_32bit": 4, "paged_lion_8bit": 1, "rmsprop_bnb": 4, "rmsprop_bnb_32bit": 4,
    "rmsprop_bnb_8bit": 1,
}  # fmt: skip
OPTIMIZERS = _TORCH_OPTIMIZERS | _BITSANDBYTES_OPTIMIZERS


class LoraSettings(Settings):
    """Low-rank adapters that train instead of the weights and are merged into them."""

    r: int = Field(default=16, ge=1, description="rank of each adapter")
    alpha: int = Field(default=32, ge=1, description="adapters are scaled by alpha / r")
    use_rslora: bool = Field(
        default=False, description="scale by alpha / sqrt(r) (rank-stabilized LoRA), for high ranks"
    )
    use_dora: bool = Field(
        default=False, description="also train the length of each weight row (DoRA); only for float layers"
    )
    targets: tuple[Literal["attention", "ffn"], ...] = Field(
        default=("attention", "ffn"),
        min_length=1,
        description="linear layers that get adapters",
    )
    save_adapter: bool = Field(
        default=False, description="also write the adapters as peft's files, in the folder adapter/"
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
        description="peak learning rate; default, for AdamW: by family, width and what is trained",
    )
    optimizer: str = Field(
        default="adamw_torch_fused",
        max_length=60,
        description="an optimizer of transformers by name, such as adafactor, sgd or adamw_bnb_8bit",
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="shape of the learning rate after the warm-up"
    )
    warmup_steps: float = Field(
        default=0.06, ge=0, description="number of updates if 1 or more, else a fraction of all updates"
    )
    batch_size: int = Field(default=32, ge=1, description="samples per batch")
    max_tokens_per_batch: int | None = Field(
        default=None, ge=1, description="instead of batch_size: tokens per batch, source, target and padding"
    )
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="batches per update")
    weight_decay: float = Field(default=0.01, ge=0, description="not for biases and norms")
    label_smoothing_factor: float = Field(
        default=0.0, ge=0, lt=1, description="weight of the uniform distribution in the targets"
    )
    sampling: Literal["uniform", "balanced"] = Field(
        default="uniform",
        description="classifiers: balanced draws each class equally often, with replacement, instead of each"
        " sample once a pass",
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this norm")
    dropout: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="replaces all dropout rates of the model; `distill` with only the logits loss: default 0",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="auto: bf16 if a trial measures a gain; fp16: on a GPU, with loss scaling",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="compute a layer's activations again in the backward pass: less memory, more time",
    )
    torch_compile: bool = Field(
        default=False,
        description="compile the forward passes of the model, and of the teacher of `distill`, with"
        " torch.compile: a minute or more before the first update, then less time; needs a C++ compiler",
    )
    max_length: int | None = Field(
        default=None, ge=2, description="texts are truncated to this many tokens; default: the model's limit"
    )
    packing: bool = Field(
        default=False,
        description="text-generation: pack samples into sequences of max_length tokens (default: of the"
        " longest sample) without attention between them; batch_size counts sequences",
    )
    num_evals: int = Field(
        default=4,
        ge=0,
        description="validations during training; 0: the last weights are kept",
    )
    early_stopping_patience: int | None = Field(
        default=None,
        ge=1,
        description="stop after this many validations without a better one (early stopping)",
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
    label_thresholds: Literal["shared", "per-label"] | float | dict[str, float] | None = Field(
        default=None,
        description="multi-label classifiers: probability above which a label is predicted: a number, numbers"
        " by label, or the highest F1 on validation with one for all (shared) or each label (per-label);"
        " default: the model's, else 0.5",
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
    dtype: StoredDtype = "keep"
    checkpoint_interval_minutes: float | None = Field(
        default=5.0,
        ge=0,
        exclude=True,  # it does not change the result, so it is not part of the key
        description="0: after each update; null: no checkpoints",
    )

    @property
    def needs_whole_parameters(self) -> tuple[str, ...]:
        """The settings that cannot be trained with parameters that are divided over processes."""
        return ()

    @property
    def changes_quantized_weights(self) -> bool:
        """Whether training changes the quantized weights; adapters do not."""
        return self.lora is None

    def required_packages(self) -> dict[str, str]:
        """Return peft if there are adapters, and the package of the optimizer."""
        packages = {} if self.lora is None else {"peft": PEFT_VERSION}
        return packages | (
            {"bitsandbytes": BITSANDBYTES_VERSION} if self.optimizer in _BITSANDBYTES_OPTIMIZERS else {}
        )

    @field_validator("optimizer")
    @classmethod
    def _check_optimizer(cls, name: str) -> str:
        if name not in OPTIMIZERS:
            raise SettingError(
                f"'{name}' is not supported; supported: {', '.join(sorted(OPTIMIZERS))}",
                code="unknown-optimizer",
            )
        return name

    @model_validator(mode="after")
    def _check_validations(self) -> Self:
        if self.metric_for_best_model != LOSS_METRIC and not self.num_evals:
            raise SettingError(
                f"metric_for_best_model: {self.metric_for_best_model[:60]} requires validations during"
                " training; set num_evals to 1 or more",
                code="no-evaluation",
            )
        if self.early_stopping_patience is not None and not self.num_evals:
            raise SettingError(
                "early_stopping_patience requires validations during training; set num_evals to 1 or more",
                code="no-evaluation",
            )
        return self


def needed_by_training(settings: TrainingSettings) -> frozenset[Need]:
    """Return the data that a training needs: training samples; validation samples if they select."""
    selects = settings.metric_for_best_model != LOSS_METRIC or isinstance(settings.label_thresholds, str)
    return frozenset({"train", "validation"} if selects else {"train"})


TrainedPart = Literal["weights", "adapters", "few bits", "fewer layers"]
# For unsupported families.
_DEFAULT_LEARNING_RATE = 5e-5
# Factors relative to training all weights of a whole model, and the largest rates. Adapters: Schulman et
# al. 2025, LoRA Without Regret, and Hu et al. 2021 (2e-4 for GPT-3, 4e-4 for RoBERTa). With fewer than four
# bits a weight must change enough to reach another quantized value. The remaining layers of a generative
# model with removed layers match less well than those of an encoder, which learns best at the rate of a whole
# one (docs/measurements/rates.md).
_SCALE_AND_MAXIMUM: dict[TrainedPart, tuple[float, float]] = {
    "weights": (1.0, 1e-3), "adapters": (10.0, 4e-4), "few bits": (10.0, 1e-3), "fewer layers": (10.0, 1e-3),
}  # fmt: skip


def default_learning_rate(config: Mapping[str, Any], trained: TrainedPart = "weights") -> float:
    """Return the peak learning rate of AdamW for the training of a model.

    Published rates of a family apply to the published width: the rate of an adaptive optimizer scales
    with 1 / width (Yang et al. 2022, Tensor Programs V, arXiv:2203.03466, table 3).

    Args:
        config: the Hugging Face config of the model, as a dict.
        trained: what is trained: all weights of a trained model, low-rank adapters, weights of fewer than
            four bits, or all weights of a model with removed layers.
    """
    family = find_family(config)
    rate = _DEFAULT_LEARNING_RATE
    if family is not None:
        rate, published_width, width = (
            family.learning_rate.peak,
            family.learning_rate.hidden_size,
            family.hidden_size(config),
        )
        if published_width and width:
            rate *= published_width / width
    if trained == "fewer layers" and (family is None or family.architecture == "encoder"):
        trained = "weights"
    times, highest = _SCALE_AND_MAXIMUM[trained]
    full_rate = min(rate, _SCALE_AND_MAXIMUM["weights"][1])
    return max(full_rate, min(highest, times * rate))


def has_fewer_layers(config: Mapping[str, Any], original_config: Mapping[str, Any]) -> bool:
    """Return whether a model has fewer layers than the original one, by their configs."""
    family = find_family(config)
    if family is None or family.name != original_config.get("model_type") or family.stacks is None:
        return False
    counts = {stack.name: stack.num_layers(config) or 0 for stack in family.stacks(config)}
    return any(
        counts.get(stack.name, 0) < (stack.num_layers(original_config) or 0)
        for stack in family.stacks(original_config)
    )


def is_mostly_low_bit(model: Any) -> bool:
    """Return whether most fake-quantized weights have fewer than four bits.

    A matrix that several layers share counts once.
    """
    from smelt.quantization.layers import MasterWeightLayer

    matrices = {
        id(m.quantized.matrix): m.quantized.matrix
        for m in model.modules()
        if isinstance(m, MasterWeightLayer)
    }
    weights = [(matrix.scheme, len(matrix.codes) * matrix.width) for matrix in matrices.values()]
    num_low_bit = sum(count for scheme, count in weights if scheme.requires_training or 0 < scheme.bits < 4)
    return 2 * num_low_bit > sum(count for _, count in weights)


def with_learning_rate(
    settings: TrainingSettings, model: Any, src: Artifact | None, ctx: Context
) -> TrainingSettings:
    """Return the settings with the default learning rate of `model` if none is set; log it.

    Layers are compared with the original model of the recipe, whichever step removed them. src: the step's
    input.
    """
    if settings.learning_rate is not None:
        return settings
    trained_part: TrainedPart = "weights"
    if settings.lora is not None:
        trained_part = "adapters"
    elif is_mostly_low_bit(model):
        trained_part = "few bits"
    elif not settings.replaces_model and has_fewer_layers(
        model.config.to_dict(), _untouched_config(src, ctx)
    ):
        trained_part = "fewer layers"
    rate = default_learning_rate(model.config.to_dict(), trained_part)
    page = "docs/reference/stages/finetune.md#learning-rates"
    ctx.log(f"learning rate {rate:.2g}, the default for {trained_part}: {page}")
    return settings.model_copy(update={"learning_rate": rate})


def _untouched_config(src: Artifact | None, ctx: Context) -> Mapping[str, Any]:
    """Return the config of the original model; empty if the student is a different model."""
    by_key = {artifact.key: artifact for artifact in ctx.ancestors.values()}
    while src is not None:
        if (src.manifest.settings.get("student") or {}).get("model"):
            return {}
        src = by_key.get(src.manifest.parent or "")
    root = ctx.ancestors.get("model")
    return {} if root is None else read_json_object(root.path / "config.json")


_GRADIENT_BYTES = 4


def fp16_error(precision: str, device: str) -> Message | None:
    """Return the error of training with `precision` on a device of this type (cpu, cuda); None if it works.

    Of fp16 only: whether a processor computes in bf16 is found by trying.
    """
    if precision != "fp16" or device == "cuda":
        return None
    return error_message(
        "no-fp16",
        "precision: fp16 requires a GPU: its loss scaling is not available on a CPU. Set precision: bf16,"
        " fp32, or auto.",
        setting="precision",
    )


def trained_weights(settings: TrainingSettings, size: ModelSize) -> int:
    """Return the number of weights that have gradients: all, or those of the adapters."""
    if settings.lora is None:
        return size.parameters
    rank_weights = 0
    for stack in size.stacks:
        feed, attention = stack.matrices[: stack.feed_forward], stack.matrices[stack.feed_forward :]
        parts = {"ffn": feed, "attention": attention}
        rank_weights += stack.layers * sum(n + m for name in settings.lora.targets for n, m in parts[name])
    return settings.lora.r * rank_weights


def weight_state_bytes(settings: TrainingSettings, size: ModelSize, validates: bool = True) -> int:
    """Return the bytes of weights, gradients, the optimizer's state, and kept copies of the weights.

    validates: whether there are validation samples, by which the best weights are kept.
    """
    trained = trained_weights(settings, size)
    num_copies = (bool(settings.num_evals) and validates) + (settings.ema_decay is not None)
    return size.float_bytes + trained * (
        _GRADIENT_BYTES + OPTIMIZERS[settings.optimizer] + num_copies * FLOAT_BYTES
    )


def training_size(
    settings: TrainingSettings,
    inputs: SizeInputs,
    *,
    teachers: Sequence[ModelSize] = (),
    samples: int | None = None,
    layer_copies: float = 0.0,
) -> StepSize:
    """Return the sizes of a training, without activations.

    Args:
        settings: of the training.
        inputs: of its step; `result` is the trained model.
        teachers: models that run on every batch, without gradients.
        samples: number of the training; None: those of the split `train`.
        layer_copies: of the linear layers' weights, that each update makes of rounded or masked ones.
    """
    size = inputs.result
    held, trained = weight_state_bytes(settings, size), trained_weights(settings, size)
    bytes_of_share = partial(_own_bytes, inputs, trained, OPTIMIZERS[settings.optimizer])
    memory = bytes_of_share(held) + round(layer_copies * FLOAT_BYTES * size.block_weights)
    memory += sum(teacher.float_bytes for teacher in teachers)
    certain = weight_state_bytes(settings, size, "validation" in inputs.samples)
    if settings.lora is not None:  # the weights may be quantized
        certain += inputs.source.held_bytes - size.float_bytes
    least, on_device, least_on_device = min(bytes_of_share(certain), memory), 0, 0
    if inputs.is_gpu:  # the CPU keeps the copies of the weights, and the model before and after
        on_device = memory - bool(settings.num_evals) * FLOAT_BYTES * trained
        # paged states move to the CPU when the GPU is full
        states = 0 if settings.optimizer.startswith("paged_") else OPTIMIZERS[settings.optimizer]
        least_on_device = bytes_of_share(size.float_bytes + trained * (_GRADIENT_BYTES + states))
        if inputs.offloaded:
            least_on_device = 0 if inputs.zero_stage == 3 else size.float_bytes
            on_device = max(least_on_device, FLOAT_BYTES * 2 * size.largest_block)
        if inputs.by_deepspeed:  # it moves the whole model before it divides it
            on_device, least_on_device = (max(n, size.float_bytes) for n in (on_device, least_on_device))
        memory, least = 2 * size.float_bytes + sum(t.float_bytes for t in teachers), size.float_bytes
    here = math.ceil(inputs.processes / inputs.machines)
    interpreters = INTERPRETER_BYTES * here * (here > 1)
    passes = trained_samples(settings, inputs.samples.get("train") if samples is None else samples)
    weights = 3 * size.parameters + sum(teacher.parameters for teacher in teachers)  # backward: two passes
    return StepSize(
        memory_bytes=memory * here + interpreters,
        least_bytes=least * (inputs.processes // inputs.machines),
        result=size,
        disk_bytes=size.stored_bytes,
        temporary_bytes=held - _GRADIENT_BYTES * trained,
        device_bytes=on_device,
        least_device_bytes=least_on_device,
        work=None if passes is None else float(weights * passes),
    )


def trained_samples(settings: TrainingSettings, samples: int | None) -> float | None:
    """Return the number of samples that a training reads, of a split of `samples`; None: unknown.

    With `max_tokens_per_batch` and `max_steps` it is the number of tokens.
    """
    if settings.max_steps:
        each = settings.max_tokens_per_batch or settings.batch_size
        return settings.max_steps * settings.gradient_accumulation_steps * each
    return None if samples is None else settings.epochs * samples


def _own_bytes(inputs: SizeInputs, trained: int, state_bytes: int, held: int) -> int:
    """Return one process's part of `held` bytes of weights, gradients, optimizer states and copies."""
    has_copies = inputs.by_deepspeed and (
        inputs.zero_stage < 3 or inputs.offloaded
    )  # DeepSpeed's own weights
    copies = FLOAT_BYTES * trained // inputs.processes if has_copies else 0
    if inputs.zero_stage == 3:
        return held // inputs.processes + copies
    divided_bytes = trained * (
        state_bytes * (inputs.zero_stage >= 1) + _GRADIENT_BYTES * (inputs.zero_stage >= 2)
    )
    return held - divided_bytes + divided_bytes // inputs.processes + copies


def lighter_trainings(settings: TrainingSettings) -> Iterator[tuple[str, TrainingSettings]]:
    """Yield settings that need less memory, with their text."""
    if OPTIMIZERS[settings.optimizer] > OPTIMIZERS["adafactor"]:
        yield "optimizer: adafactor", settings.model_copy(update={"optimizer": "adafactor"})
    if settings.lora is None:
        yield "lora: {}", settings.model_copy(update={"lora": LoraSettings()})
