"""Propose steps and notes for a model that is already quantized, for `smelt init`."""

from __future__ import annotations

from collections.abc import Iterator

from smelt.core.data import SENTENCE_SIMILARITY
from smelt.inspect.init_stages import MachineInfo, ProposedStep
from smelt.inspect.model_info import ModelInfo
from smelt.inspect.quantized_model import QuantizedModelInfo
from smelt.runtime.schemes.registry import SCHEMES

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
        how = "{epochs: 1, learning_rate: 2.0e-5, qat: {scales: lsq}}"
        why = "train the quantized weights; same size and speed"
        yield ProposedStep("finetune", how, why, "tuned", "model")
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
        train and learns and model_info.task != SENTENCE_SIMILARITY
    )  # its samples may have no scores to train on
