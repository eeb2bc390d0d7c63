"""Settings and cost of the training loop; without torch, so that the table of stages loads quickly.

They include the default learning rates: by family, width, and what is trained. The cost is
estimated: updates, validations, optimizer and activations.

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
from smelt.core.stage import Context, Need, Settings, StoredDtype
from smelt.models.costs import (
    INTERPRETER_BYTES,
    Batch,
    CostInputs,
    SampleLengths,
    StepCost,
    Work,
    activation_bytes,
    forward_work,
    generated,
    generation_over,
    load_work,
    save_work,
    total,
)
from smelt.models.families.registry import find_family
from smelt.models.model_size import FLOAT_BYTES, ModelSize

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
        description="peak learning rate; default, for AdamW: by family, width and what is trained",
    )
    optimizer: str = Field(
        default="adamw_torch_fused",
        max_length=60,
        description="an optimizer of transformers by name, such as adafactor, sgd or adamw_bnb_8bit",
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
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="auto: bf16 if a trial measures a gain; fp16: on a GPU, with loss scaling",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="compute a layer's activations again in the backward pass: less memory, more time",
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
    patience: int | None = Field(
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
    def _known_optimizer(cls, name: str) -> str:
        if name not in OPTIMIZERS:
            raise SettingError(
                f"'{name}' is not supported; supported: {', '.join(sorted(OPTIMIZERS))}",
                code="unknown-optimizer",
            )
        return name

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if self.metric_for_best_model != LOSS_METRIC and not self.num_evals:
            raise SettingError(
                f"metric_for_best_model: {self.metric_for_best_model[:60]} requires validations during"
                " training; set num_evals to 1 or more",
                code="no-evaluation",
            )
        if self.patience is not None and not self.num_evals:
            raise SettingError(
                "patience requires validations during training; set num_evals to 1 or more",
                code="no-evaluation",
            )
        return self


def needed_by_training(settings: TrainingSettings) -> frozenset[Need]:
    """Return the data that a training needs: training samples; validation samples if a metric selects."""
    return frozenset({"train"} if settings.metric_for_best_model == LOSS_METRIC else {"train", "validation"})


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


def has_fewer_layers(config: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Return whether a model has fewer layers than the original one, by their configs."""
    family = find_family(config)
    if family is None or family.name != whole.get("model_type") or family.stacks is None:
        return False
    counts = {stack.name: stack.num_layers(config) or 0 for stack in family.stacks(config)}
    return any(counts.get(stack.name, 0) < (stack.num_layers(whole) or 0) for stack in family.stacks(whole))


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
    ctx.log(f"learning rate {rate:.2g}, for {trained_part} of such a model ({page})")
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
# Bytes that AdamW, the norm of the gradients and their clipping read and write for each weight.
_UPDATE_BYTES = 44
# Freed memory is kept for the next update (`freed_memory_retained`), in pieces that do not fit all of them.
_FRAGMENTATION = 1.25
# Of torch operations that take as long as Trainer's imports and start, and as tokenizing a text.
_START_CALLS, _TEXT_CALLS = 1.2e6, 25
# The same of the launcher of several processes, and of the start of each with torch, transformers and plan.
_LAUNCHER_CALLS, _PROCESS_CALLS = 6e5, 3e6
# Training through rounded weights and activations: element-wise passes over all weights in an update, and how
# much longer the layers take.
_ROUNDING_PASSES, _ROUNDING_FACTOR = 150, 3.5


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
    return settings.lora.rank * rank_weights


def weight_state_bytes(settings: TrainingSettings, size: ModelSize, validates: bool = True) -> int:
    """Return the bytes of weights, gradients, the optimizer's state, and kept copies of the weights.

    validates: whether there are validation samples, by which the best weights are kept.
    """
    trained = trained_weights(settings, size)
    num_copies = (bool(settings.num_evals) and validates) + (settings.ema_decay is not None)
    return size.float_bytes + trained * (
        _GRADIENT_BYTES + OPTIMIZERS[settings.optimizer] + num_copies * FLOAT_BYTES
    )


def training_cost(
    settings: TrainingSettings,
    inputs: CostInputs,
    *,
    teachers: Sequence[ModelSize] = (),
    samples: SampleLengths | None = None,
    layer_copies: float = 0.0,
) -> StepCost:
    """Return the cost of a training.

    Args:
        settings: of the training.
        inputs: of its step; `result` is the trained model.
        teachers: models that run on every batch, without gradients.
        samples: of the training; None: the split `train`.
        layer_copies: of the linear layers' weights, that each update makes of rounded or masked ones.
    """
    size = inputs.result
    samples = samples or inputs.samples.get("train")
    state_bytes, trained = weight_state_bytes(settings, size), trained_weights(settings, size)
    work, active = None, 0
    if samples is not None:
        batches = _training_batches(settings, samples)
        active = _batch_bytes(settings, size, batches, len(teachers)) // inputs.processes
        work = _training_work(settings, inputs, samples, batches, teachers, layer_copies > 0)
        work += load_work(inputs.source) + save_work(size) + total([load_work(t) for t in teachers])
    process_bytes = partial(_own_bytes, inputs, trained, OPTIMIZERS[settings.optimizer])
    memory = process_bytes(state_bytes) + active + round(layer_copies * FLOAT_BYTES * size.block_weights)
    memory += sum(teacher.float_bytes for teacher in teachers)
    certain_state = weight_state_bytes(settings, size, "validation" in inputs.samples)
    if settings.lora is not None:  # the weights may be quantized
        certain_state += inputs.source.held_bytes - size.float_bytes
    least_bytes, on_device, least_on_device = process_bytes(certain_state), 0, 0
    if inputs.is_gpu:  # the CPU keeps the copies of the weights, and the model before and after
        on_device = memory - bool(settings.num_evals) * FLOAT_BYTES * trained
        # paged states move to the CPU when the GPU is full
        states = 0 if settings.optimizer.startswith("paged_") else OPTIMIZERS[settings.optimizer]
        least_on_device = process_bytes(size.float_bytes + trained * (_GRADIENT_BYTES + states))
        if inputs.offloaded:
            least_on_device = 0 if inputs.zero_stage == 3 else size.float_bytes
            on_device = active + max(least_on_device, FLOAT_BYTES * 2 * size.largest_block)
        if inputs.by_deepspeed:  # it moves the whole model before it divides it
            on_device, least_on_device = (max(n, size.float_bytes) for n in (on_device, least_on_device))
        memory, least_bytes = 2 * size.float_bytes + sum(t.float_bytes for t in teachers), size.float_bytes
    local_processes = math.ceil(inputs.processes / inputs.machines)
    interpreters = INTERPRETER_BYTES * local_processes * (local_processes > 1)
    return StepCost(
        work=work,
        memory_bytes=memory * local_processes + interpreters,
        least_bytes=least_bytes * (inputs.processes // inputs.machines),
        result=size,
        disk_bytes=size.stored_bytes,
        temporary_bytes=state_bytes - _GRADIENT_BYTES * trained,
        device_bytes=on_device,
        least_device_bytes=least_on_device,
    )


def _own_bytes(inputs: CostInputs, trained: int, state_bytes: int, held: int) -> int:
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


def _batch_bytes(settings: TrainingSettings, size: ModelSize, batches: Sequence[Batch], teachers: int) -> int:
    """Return the bytes of activations and logits for the largest batch."""
    largest = max(batches, key=lambda batch: activation_bytes(size, batch, False))
    batch_bytes = activation_bytes(size, largest, settings.dropout != 0, settings.gradient_checkpointing)
    tokens = largest.target if size.is_encoder_decoder else largest.source + largest.target
    batch_bytes += teachers * FLOAT_BYTES * largest.samples * tokens * size.output_width
    return round(batch_bytes * _FRAGMENTATION)


def _training_batches(settings: TrainingSettings, samples: SampleLengths) -> list[Batch]:
    if settings.max_length is not None:
        samples = samples.limited(settings.max_length)
    if settings.packing:
        length = settings.max_length or max(samples.source, default=1)
        count = max(1, math.ceil(sum(samples.source) / length))
        samples = SampleLengths((length,) * count, (0,) * count, count)
    return samples.batches(settings.batch_size, settings.max_tokens_per_batch) or [Batch(1, 1, 1)]


def _training_work(
    settings: TrainingSettings,
    inputs: CostInputs,
    samples: SampleLengths,
    batches: Sequence[Batch],
    teachers: Sequence[ModelSize],
    rounds: bool,
) -> Work:
    size, task = inputs.result, inputs.task
    per_epoch = len(batches) * samples.count / max(1, len(samples.source))
    accumulated = settings.gradient_accumulation_steps
    count = settings.max_steps * accumulated if settings.max_steps else settings.epochs * per_epoch
    batches_work = total([forward_work(size, batch, task, "training") for batch in batches])
    for teacher in teachers:
        batches_work += total([forward_work(teacher, batch, task) for batch in batches])
    if settings.gradient_checkpointing:
        batches_work += total([forward_work(size, batch, task) for batch in batches])
    updates = Work.of("moved", _UPDATE_BYTES * trained_weights(settings, size)) * (count / accumulated)
    if inputs.zero_stage:  # each process updates its part
        updates *= 1 / inputs.processes
    if rounds:
        batches_work *= _ROUNDING_FACTOR
        updates += Work.of("moved", _ROUNDING_PASSES * FLOAT_BYTES * size.parameters) * count
    texts = samples.count * (2 if any(samples.target) else 1)
    started = Work.of("calls", _START_CALLS + _TEXT_CALLS * texts) + _start_work(inputs)
    training_work = (
        started + _shared_work(batches_work * (count / len(batches)), inputs) + updates * inputs.turns
    )
    validation = inputs.samples.get("validation")
    if settings.num_evals and validation is not None:
        validation_lengths = validation.first(settings.max_validation_samples)
        scoring_work = total(
            [forward_work(size, batch, task) for batch in _training_batches(settings, validation_lengths)]
        )
        scoring_work = _shared_work(scoring_work, inputs)
        if settings.metric_for_best_model != LOSS_METRIC and generated(task):
            scoring_work += generation_over(validation_lengths, size, 32, 1)  # by process 0
        training_work += scoring_work * (settings.num_evals + 1)  # the initial weights are scored too
    return training_work


def _shared_work(work: Work, inputs: CostInputs) -> Work:
    """Return the work on batches of which each process computes a part: it makes all calls for its part."""
    parts = {
        (unit, width): amount * (inputs.turns if unit == "calls" else 1 / inputs.concurrent)
        for (unit, width), amount in work.amounts.items()
    }
    return Work(parts)


def _start_work(inputs: CostInputs) -> Work:
    """Return the work of starting several processes, which share the cores of their machine; else none."""
    if inputs.processes == 1:
        return Work()
    local_processes = math.ceil(inputs.processes / inputs.machines)
    process_turns = max(1.0, local_processes / inputs.cores)
    return Work.of("calls", _LAUNCHER_CALLS + _PROCESS_CALLS * process_turns) + load_work(inputs.source) * (
        process_turns - 1
    )


def lighter_trainings(settings: TrainingSettings) -> Iterator[tuple[str, TrainingSettings]]:
    """Yield settings that need less memory for the same updates, or for another training, with their text."""
    if settings.max_tokens_per_batch is None:
        for parts in (2, 4, 8, 16, 32):
            if settings.batch_size >= parts:
                size, times = settings.batch_size // parts, settings.gradient_accumulation_steps * parts
                text = f"batch_size: {size}, gradient_accumulation_steps: {times}"
                yield (
                    text,
                    settings.model_copy(update={"batch_size": size, "gradient_accumulation_steps": times}),
                )
    if not settings.gradient_checkpointing:
        yield "gradient_checkpointing: true", settings.model_copy(update={"gradient_checkpointing": True})
    if OPTIMIZERS[settings.optimizer] > OPTIMIZERS["adafactor"]:
        yield "optimizer: adafactor", settings.model_copy(update={"optimizer": "adafactor"})
    if settings.lora is None:
        yield "lora: {}", settings.model_copy(update={"lora": LoraSettings()})
