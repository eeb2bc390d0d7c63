"""Check from config and headers that the quantized weights in a model's folder are supported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.data import CLASSIFICATION_TASKS, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, error_message
from smelt.recipe.problem_type import has_classifier
from smelt.runtime.models.create.seq2seq_head import lacks_head
from smelt.runtime.models.quantized_checkpoint.check_headers import (
    require_quantized_tensors,
    undeclared_quantized_layer,
)
from smelt.runtime.models.quantized_checkpoint.quantization_config import (
    QUANTIZATION_CONFIG_KEY,
    new_head_message,
    parse_quantization_config,
)


def quantization_problems(
    folder: Path, config: Mapping[str, Any], task: Task | None, whole: bool
) -> list[Message]:
    """Return errors if the quantized weights declared in the config are not supported.

    Checks that need the values (order of inputs, zero points of 16, scales outside the range of float16,
    sizes in the config) are made during the run.

    Args:
        folder: the model's folder.
        config: its Hugging Face config; empty if missing.
        task: task of the model; None if unknown.
        whole: whether the headers of the weights can be read.
    """
    try:
        coding = parse_quantization_config(config)
    except InputError as error:
        return [error.as_message().with_prefix(f"{folder / 'config.json'}: ")]
    try:
        if coding is None:
            return _undeclared_quantization(folder) if whole else []
        if whole:
            require_quantized_tensors(folder, coding)
    except InputError as error:
        return [error.as_message()]
    wants_head = lacks_head(config) or (task in CLASSIFICATION_TASKS and not has_classifier(config))
    return [error_message("head-on-quantized", f"{folder}: {new_head_message(coding)}")] if wants_head else []


def _undeclared_quantization(folder: Path) -> list[Message]:
    """Return an error if there are quantized weights that the config does not declare."""
    layer = undeclared_quantized_layer(folder)
    if layer is None:
        return []
    return [
        error_message(
            "missing-quantization-config",
            f"{folder}: '{layer}.qweight' and other tensors are quantized, but config.json has no"
            f" {QUANTIZATION_CONFIG_KEY}. Older tools wrote it to a separate file (quantize_config.json,"
            f" quant_config.json): copy its content to config.json as {QUANTIZATION_CONFIG_KEY}, with"
            " quant_method: gptq or awq.",
        )
    ]
