"""Choose the steps that `smelt init` proposes, by task, training samples and machine.

Models that are already quantized get their own steps and notes. The training time of a proposed recipe is
estimated for this machine's CPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smelt.data.json_rows import data_suffix, read_text_file
from smelt.data.read_rows import read_file_rows
from smelt.data.tasks import Task, task_traits
from smelt.models.families.limits import no_blocks_reason
from smelt.models.families.registry import FAMILIES, find_family
from smelt.pipeline.inspect.data_files import DataInfo
from smelt.pipeline.inspect.model_info import ModelInfo, QuantizedModelInfo
from smelt.pipeline.recipe.stages import MODEL_STEP, load_stage
from smelt.pipeline.recipe.yaml_file import parse_yaml
from smelt.quantization.schemes.registry import DEFAULT_SCHEME, SCHEMES, SCHEMES_BY_BITS, STATIC_SCHEME
from smelt.tasks.registry import task_spec
from smelt.training.settings import TrainingSettings

# Training samples from which a shortlist is proposed: with 2,000 it cost a translator 2.4 BLEU, with 29,000
# little (docs/measurements/techniques.md); nothing in between was measured.
MIN_SHORTLIST_ROWS = 10_000
# Training samples from which a first recipe distills a pruned classifier: with 1,000 and 2,000 (SST-2,
# MiniLM) one epoch gained nothing after pruning, which lost 0 and 1 points.
_MIN_DISTILL_ROWS = 5_000
_LOGITS_LOSS, _MAX_WIDTH = "losses: {logits: 1.0, labels: 0}, temperature: 1.0", 80


@dataclass(frozen=True)
class MachineInfo:
    """The machine that a recipe is for. cores: physical ones. ort_tensorrt: TensorRT in ONNX Runtime."""

    cores: int
    gpu: bool
    tensorrt: bool
    openvino: bool = False
    ort_tensorrt: bool = False


@dataclass(frozen=True)
class ProposedStep:
    """A step in the list of stages, with a comment."""

    stage: str
    settings: str = "{}"
    comment: str = ""
    name: str = ""
    parent: str = ""
    optional: bool = False


def propose_steps(
    model_info: ModelInfo,
    machine: MachineInfo,
    train: bool,
    fast: bool = False,
    rows: int = MIN_SHORTLIST_ROWS,
    selection_metric: str = "",
    calibration: bool = False,
    serve: bool = False,
) -> Iterator[ProposedStep]:
    """Yield the proposed steps for the task.

    Args:
        model_info: the model.
        machine: the machine.
        train: whether there are training samples.
        fast: propose stronger compression with longer training instead of a quick first recipe.
        rows: number of training samples, as far as they were counted.
        selection_metric: metric that selects checkpoints; empty without validation data.
        calibration: whether there are calibration samples; they are used where there are none for training.
        serve: propose int8 without answers that depend on the other samples of their batch.
    """
    scheme = _int8_scheme(train or calibration, serve)
    convolutional = no_blocks_reason(model_info.config) is not None  # convolutions are not quantized
    steps: Iterator[ProposedStep]
    if train:
        is_fast = fast and not convolutional
        # measured for translators only; an encoder may have one output channel far above the others
        per_tensor = is_fast and scheme == DEFAULT_SCHEME and model_info.traits.output == "text"
        per_tensor = per_tensor and model_info.traits.architecture == "encoder-decoder"
        training_steps = (
            _fast_steps(model_info, rows, selection_metric) if is_fast else _training_steps(model_info, rows)
        )
        int8_source = "" if convolutional else "tuned" if model_info.needs_classifier else MODEL_STEP
        steps = itertools.chain(
            training_steps,
            _export_steps(machine, convolutional, "small", scheme, int8_source, per_tensor),
        )
    else:
        steps = _training_free_steps(model_info, machine, convolutional, calibration, scheme)
    for step in steps:
        if model_info.task in load_stage(step.stage).tasks:
            yield step


def _int8_scheme(has_samples: bool, serve: bool) -> str:
    """Return the int8 scheme; has_samples: whether there are some to calibrate on.

    Of the schemes without ranges over a batch the static one is as fast as the default
    (docs/measurements/int8-static.md); the one in groups is slower from 8 rows on (int8-groupwise.md).
    """
    if not serve:
        return DEFAULT_SCHEME
    return STATIC_SCHEME if has_samples else SCHEMES_BY_BITS[8].name


def _classifier_training(model_info: ModelInfo) -> Iterator[ProposedStep]:
    if model_info.needs_classifier:
        yield ProposedStep("finetune", "{epochs: 3, learning_rate: 5.0e-5}", "train the new head", "tuned")


def _distill_losses(task: Task) -> str:
    """Return the losses of `distill`: only the teacher's logits, or also labels where they help."""
    if task_traits(task).generates:
        return _LOGITS_LOSS
    return f"losses: {{{task_spec(task).distill_losses}}}"


def _teacher_setting(model_info: ModelInfo) -> str:
    return "teacher: tuned, " if model_info.needs_classifier else ""


def _is_depthwise(config: Mapping[str, Any]) -> bool:
    """Return whether convolutions with kernels are depthwise, so that none can be factorized."""
    family = find_family(config)
    return family is not None and not family.has_dense_kernels


def _training_steps(model_info: ModelInfo, rows: int) -> Iterator[ProposedStep]:
    yield from _classifier_training(model_info)
    teacher, traits = _teacher_setting(model_info), model_info.traits
    if _is_depthwise(model_info.config):
        yield ProposedStep("quantize", f"{{scheme: {STATIC_SCHEME}}}", "int8 convolutions", "small")
        return
    if no_blocks_reason(model_info.config):
        yield ProposedStep("factorize", "{method: tucker, keep_ratio: 0.5}", "low-rank convolutions")
        settings = f"{{{teacher}losses: {{logits: 1.0, labels: 0.5}}, epochs: 3}}"
        yield ProposedStep("distill", settings, "recover the lost quality", "small")
        return
    # by magnitude, as the samples may have no scores to compute a loss from
    settings = ", importance: magnitude" if traits.output == "embedding" else ""
    classifies = traits.classifies and traits.modality == "text"
    is_small = classifies and rows < _MIN_DISTILL_ROWS
    name = "small" if is_small else ""
    yield ProposedStep(
        "prune",
        f"{{targets: [ffn], keep_ratio: 0.75{settings}}}",
        "remove a quarter of the FFN neurons",
        name,
    )
    if is_small:
        return
    settings = f"{{{teacher}{_distill_losses(model_info.task)}, epochs: 1}}"
    yield ProposedStep("distill", settings, "recover the lost quality", "small")


def _fast_steps(model_info: ModelInfo, rows: int, selection_metric: str) -> Iterator[ProposedStep]:
    """Yield the steps with the best results for each task in docs/measurements/README.md."""
    yield from _classifier_training(model_info)
    teacher, counts = _teacher_setting(model_info), layer_counts(model_info)
    select = f", metric_for_best_model: {selection_metric}" if selection_metric else ""
    if model_info.traits.architecture == "encoder-decoder":
        yield ProposedStep(
            "onnx", "{target: ort-cpu}", "generates the training texts for the student", "whole-onnx"
        )
        layer_setting = f"student: {{decoder_layers: {max(1, counts['decoder_layers'] // 3)}}}"
        settings = (
            f"{layer_setting}, sequence_level: {{num_beams: 5, original_ratio: 0.5, generator: whole-onnx}}"
        )
        settings += f", {_LOGITS_LOSS}, epochs: 6, lr_scheduler_type: cosine{select}"
        comment = "fewer decoder layers, which run once per generated token"
        enough = rows >= MIN_SHORTLIST_ROWS and model_info.traits.modality == "text"
        yield ProposedStep("distill", f"{{{settings}}}", comment, "shallow" if enough else "small", "model")
        if enough:
            yield ProposedStep("shortlist", "{}", "restrict the output tokens for each source", "small")
        return
    if model_info.traits.classifies:
        yield from _narrow_model_steps(teacher, select, *counts.items())
        return
    ((name, count), *_) = counts.items()
    if model_info.traits.architecture == "decoder":  # text quality drops with each removed layer
        if count > 1:
            layer_setting = f"{{{name}: {min(count - 1, round(0.8 * count))}}}"
            yield ProposedStep("drop-layers", layer_setting, "remove the least important layers", "shallow")
        yield ProposedStep("prune", "{targets: [ffn], keep_ratio: 0.5}", "remove half of the FFN neurons")
        losses = "losses: {logits: 0.5, labels: 0.5}, temperature: 2.0"
        settings = f"{{{losses}, epochs: 1, lr_scheduler_type: cosine}}"
        yield ProposedStep("distill", settings, "recover the lost quality", "small")
        return
    layer_setting = f"student: {{{name}: {max(1, round(count / 3))}}}"
    losses = _distill_losses(model_info.task)
    yield ProposedStep(
        "distill",
        f"{{{teacher}{layer_setting}, {losses}, epochs: 3}}",
        "a student with fewer layers",
        "shallow",
    )
    settings = "{targets: [ffn], keep_ratio: 0.5, importance: magnitude}"
    yield ProposedStep("prune", settings, "remove half of the FFN neurons")
    yield ProposedStep("distill", f"{{{teacher}{losses}, epochs: 2}}", "recover the lost quality", "small")


def _narrow_model_steps(teacher: str, metric_setting: str, stack: tuple[str, int]) -> Iterator[ProposedStep]:
    """Yield steps that keep half of the layers and neurons; a third of the layers gave worse results."""
    name, count = stack
    if count > 1:
        settings = f"{{{name}: {round(count / 2)}}}"
        yield ProposedStep("drop-layers", settings, "remove the less important half of the layers", "shallow")
    yield ProposedStep("prune", "{targets: [ffn], keep_ratio: 0.5}", "remove half of the FFN neurons")
    settings = f"{{{teacher}losses: {{logits: 1.0, labels: 0}}, temperature: 2.0, epochs: 3{metric_setting}}}"
    yield ProposedStep("distill", settings, "recover the lost quality", "small")


def layer_counts(model_info: ModelInfo) -> dict[str, int]:
    """Return the number of layers of each stack by its name in settings; 1 if not in the config."""
    stacks = FAMILIES[model_info.family].stacks
    return (
        {}
        if stacks is None
        else {s.name: s.num_layers(model_info.config) or 1 for s in stacks(model_info.config)}
    )


def _training_free_steps(
    model_info: ModelInfo, machine: MachineInfo, convolutional: bool, calibration: bool, scheme: str
) -> Iterator[ProposedStep]:
    """Yield exports and quantization: nothing restores the quality that pruning or low ranks lose."""
    if _is_depthwise(model_info.config):
        if calibration:
            yield ProposedStep("quantize", f"{{scheme: {STATIC_SCHEME}}}", "int8 convolutions", "small")
        yield from _export_steps(machine, convolutional, "small" if calibration else MODEL_STEP, scheme)
        return
    if convolutional:
        settings = "{method: tucker, energy: 0.9}"
        yield ProposedStep("factorize", settings, "with training samples, add distill after it", "small")
        yield from _export_steps(machine, convolutional, "small", scheme)
        return
    yield from _export_steps(machine, convolutional, MODEL_STEP, scheme)
    four_bits = SCHEMES_BY_BITS[4].name
    if not calibration:
        settings, name = f"{{scheme: {four_bits}, clip: mse}}", four_bits
        comment = "4-bit weights in clipped ranges; a calibration file improves them"
    elif model_info.traits.generates or scheme == STATIC_SCHEME:  # proposed above
        settings, name = f"{{scheme: {four_bits}, method: gptq}}", four_bits
        comment = "4-bit weights, rounded on calibration samples"
    else:
        settings, name = f"{{scheme: {STATIC_SCHEME}}}", STATIC_SCHEME
        comment = "activation ranges from calibration samples"
    yield ProposedStep("quantize", settings, comment, name, MODEL_STEP)
    yield ProposedStep("onnx", "{target: ort-cpu}", "", f"onnx-{name}")


def _export_steps(
    machine: MachineInfo,
    convolutional: bool,
    source: str,
    scheme: str,
    int8_source: str = "",
    per_tensor: bool = False,
) -> Iterator[ProposedStep]:
    """Yield the exports of the step `source`, which is the one before them, or the model.

    Args:
        machine: the machine.
        convolutional: whether the model is of convolutions.
        source: the step that is exported.
        scheme: of the quantized steps.
        int8_source: the step of a branch that is only quantized, if there is one.
        per_tensor: also propose one scale per matrix; the run's verdict chooses by score and speed.
    """
    comment = "for deployment on a CPU" if convolutional else "without quantization, for comparison"
    yield ProposedStep("onnx", "{target: ort-cpu}", comment, "onnx-fp32")
    if machine.openvino:
        yield ProposedStep(
            "onnx", "{target: openvino}", "the same for OpenVINO", "openvino", source, optional=True
        )
    if not convolutional:
        text = "int8 weights" if scheme == DEFAULT_SCHEME else "int8, no answer depends on its batch"
        yield ProposedStep("quantize", f"{{scheme: {scheme}}}", text, "int8", source)
        yield ProposedStep("onnx", "{target: ort-cpu}", "for deployment on a CPU", "onnx-int8")
    if per_tensor:
        settings = f"{{scheme: {scheme}, granularity: tensor}}"
        comment = "one scale per matrix: faster, unless the score drops"
        yield ProposedStep("quantize", settings, comment, "int8-tensor", source)
        yield ProposedStep("onnx", "{target: ort-cpu}", "", "onnx-int8-tensor")
    if int8_source:  # often the smallest loss of quality
        settings = f"{{scheme: {scheme}}}"
        yield ProposedStep("quantize", settings, "only int8, for comparison", "int8-alone", int8_source)
        yield ProposedStep("onnx", "{target: ort-cpu}", "", "onnx-int8-alone")
    if machine.gpu or machine.tensorrt:
        yield ProposedStep("onnx", "{target: tensorrt, dtype: fp16}", "for GPUs", "onnx-fp16", source)
        yield ProposedStep("tensorrt", "{}", "skipped if it cannot run", optional=True)
    if machine.ort_tensorrt:
        settings = "{target: ort-tensorrt, dtype: fp16}"
        yield ProposedStep(
            "onnx", settings, "TensorRT engines in ONNX Runtime", "ort-tensorrt", source, optional=True
        )


def step_lines(step: ProposedStep) -> Iterator[str]:
    """Yield the lines of a step; beyond 80 columns, the comment is put above and settings are split."""
    text = f"  - {step.stage}: {step.settings}"
    comment = f"    # {step.comment}" if step.comment else ""
    if len(text) + len(comment) > _MAX_WIDTH:
        yield from [f"  # {step.comment}:"] if step.comment else []
        comment = ""
    if len(text) > _MAX_WIDTH:
        yield f"  - {step.stage}:"
        yield from _mapping_lines(step.settings)
    else:
        yield text + comment
    for key, value in (("name", step.name), ("from", step.parent), ("optional", step.optional and "true")):
        if value:
            yield f"    {key}: {value}"


def _mapping_lines(settings: str) -> Iterator[str]:
    """Yield a mapping in braces with one line per key."""
    depth, line = 0, "      "
    for letter in settings[1:-1]:
        depth += (letter in "{[") - (letter in "]}")
        if letter == "," and not depth:
            yield line
            line = "     "  # a space follows the comma
        else:
            line += letter
    yield line


_EXPORT_STEP = "onnx-codes"
_TUNED_EXPORT_STEP = "onnx-tuned"


def quantized_model_steps(model_info: ModelInfo, machine: MachineInfo, train: bool) -> Iterator[ProposedStep]:
    """Yield the proposed steps for a quantized model: export, and training of the quantized weights.

    Stages for float weights are not possible. `distill` is not proposed, as the model would be its own,
    identical teacher.

    Args:
        model_info: the model.
        machine: the machine.
        train: whether there are training samples.
    """
    targets = model_info.quantization.targets if model_info.quantization else []
    if "ort-cpu" in targets:
        yield ProposedStep(
            "onnx", "{target: ort-cpu}", "for deployment on a CPU, weights unchanged", _EXPORT_STEP
        )
    if machine.openvino and "openvino" in targets:
        yield ProposedStep(
            "onnx", "{target: openvino}", "the same for OpenVINO", "openvino", "model", optional=True
        )
    if _can_train(model_info, train):
        # learned scales start from the stored ones, so the first update uses the original quantized weights
        settings = "{epochs: 1, learning_rate: 2.0e-5, qat: {scales: lsq}}"
        comment = "train the quantized weights; same size and speed"
        yield ProposedStep("finetune", settings, comment, "tuned", "model")
        yield ProposedStep(
            "onnx", "{target: ort-cpu}", "deploy this one if training helped", _TUNED_EXPORT_STEP
        )


def quantized_model_notes(quantization: QuantizedModelInfo, fast: bool) -> Iterator[str]:
    """Yield notes on a quantized model, without full stops. fast: whether --fast was set."""
    yield (
        f"the weights are already quantized ({quantization.description}) and are kept; pruning, removing"
        f" layers, factorization and other schemes need float weights: start from {quantization.float_source}"
    )
    if fast:
        yield (
            "--fast has no effect, because it removes layers and neurons, which needs float weights; use the"
            " float model"
        )


def gated_step(model_info: ModelInfo, train: bool) -> str:
    """Return the name of the step for the proposed gate."""
    return _TUNED_EXPORT_STEP if _can_train(model_info, train) else _EXPORT_STEP


def _can_train(model_info: ModelInfo, train: bool) -> bool:
    """Return whether there are training samples and learnable scales."""
    schemes = model_info.quantization.schemes if model_info.quantization else ()
    learns = any(SCHEMES[name].learnable_scales for name in schemes)
    return (
        train and learns and model_info.traits.output != "embedding"
    )  # its samples may have no scores to train on


# Maximum number of samples to count, and of samples whose characters are counted.
_MAX_COUNTED_ROWS, _MEASURED_ROWS = 300_000, 500
_CHARS_PER_TOKEN = 4  # in languages with spaces
# Operations per weight and token: a multiplication and an addition in the forward pass, twice as many in the
# backward pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1); a teacher adds a forward pass.
_TRAINING_OPS_PER_WEIGHT, _FORWARD_OPS_PER_WEIGHT = 6, 2
# Training throughput relative to one large matrix multiplication: 96 updates of a translator with 8.4 million
# weights took 90 s instead of 33 s.
_COMPUTE_EFFICIENCY = 0.35


def training_time_text(model_info: ModelInfo, data: DataInfo, steps: Iterable[ProposedStep]) -> str | None:
    """Return a note on the training time of `steps` on this machine; None if it cannot be estimated.

    A rough estimate from the number of operations, to distinguish minutes from days.
    """
    settings = [
        (step.stage, _parse_settings(step)) for step in steps if step.stage in ("finetune", "distill")
    ]
    if (
        not settings
        or not model_info.parameters
        or model_info.traits.modality != "text"
        or "train" not in data.splits
    ):
        return None
    num_rows, chars_per_row = _count_rows_and_chars(data)
    # in an encoder-decoder each half processes one side
    tokens = (
        chars_per_row / _CHARS_PER_TOKEN / (2 if model_info.traits.architecture == "encoder-decoder" else 1)
    )
    epochs = work = 0.0
    for stage, values in settings:
        passes = float(values.get("epochs", TrainingSettings.model_fields["epochs"].default))
        sequence_level: Mapping[str, Any] = values.get("sequence_level") or {}
        passes /= 1 - float(sequence_level.get("original_ratio", 0))
        epochs += passes
        work += passes * (
            _TRAINING_OPS_PER_WEIGHT + _FORWARD_OPS_PER_WEIGHT * (stage == "distill")
        ) + _FORWARD_OPS_PER_WEIGHT * float(sequence_level.get("num_beams", 0))
    weights = model_info.parameters - _embedding_parameters(model_info)
    seconds = work * weights * num_rows * tokens / (_COMPUTE_EFFICIENCY * _operations_per_second())
    prefix = "at least " if num_rows >= _MAX_COUNTED_ROWS * (1 - sum(data.fractions.values())) else ""
    number = f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
    time_text = f"{prefix}roughly {_duration_text(seconds)}"
    return f"training takes {number} on {prefix}{num_rows:,} samples; on this CPU {time_text}"


def _embedding_parameters(model_info: ModelInfo) -> int:
    """Return the number of weights without operations: the embedding of a model that does not generate."""
    writes = model_info.traits.generates
    vocab_size, width = (
        model_info.config.get("vocab_size"),
        FAMILIES[model_info.family].embedding_size(model_info.config),
    )
    if writes or not isinstance(vocab_size, int) or width is None:
        return 0
    return min(vocab_size * width, model_info.parameters or 0)


def _parse_settings(step: ProposedStep) -> Mapping[str, Any]:
    document: Any = parse_yaml(f"a: {step.settings}", "").value
    return dict(document["a"])


def _count_rows_and_chars(data: DataInfo) -> tuple[int, float]:
    """Return the number of training samples, and the mean number of characters per sample."""
    path = data.splits["train"]
    if data_suffix(path) == ".txt":
        text = read_text_file(path)
        lines = text.removesuffix("\n").count("\n") + 1
        return round(lines * (1 - sum(data.fractions.values()))), len(text) / lines
    samples = read_file_rows(path)
    sample_values = (row.values() for _, row in itertools.islice(samples, _MEASURED_ROWS))
    char_counts = [sum(len(value) for value in row if isinstance(value, str)) for row in sample_values]
    count = len(char_counts) + sum(1 for _ in itertools.islice(samples, _MAX_COUNTED_ROWS))
    return round(count * (1 - sum(data.fractions.values()))), sum(char_counts) / max(1, len(char_counts))


def _operations_per_second(size: int = 512) -> float:
    """Return the float32 operations per second of the CPU in a matrix multiplication (best of 50).

    The shorter of time and processor time counts, which other work on the machine hardly changes.
    """
    import numpy as np

    a = np.ones((size, size), np.float32)
    best = float("inf")
    for _ in range(50):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        a @ a
        best = min(best, time.perf_counter() - wall_start, time.process_time() - cpu_start)
    return 2 * size**3 / max(best, 1e-9)


def _duration_text(seconds: float) -> str:
    """Return a duration as text with at most two significant digits."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{float(f'{seconds / length:.2g}'):g} {unit}"
    return "a minute"
