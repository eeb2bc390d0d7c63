"""Write config.pbtxt in protobuf's text format.

Source: triton-inference-server/common, protobuf/model_config.proto (message ModelConfig).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EnumValue:
    """An enum value, which the text format writes without quotation marks."""

    name: str


@dataclass(frozen=True)
class TritonTensor:
    """An input or output: name, DataType (TYPE_INT64), dimensions without the batch (-1: any)."""

    name: str
    kind: str
    dims: tuple[int, ...]


def model_config(
    name: str,
    backend: str,
    inputs: Sequence[TritonTensor],
    outputs: Sequence[TritonTensor],
    max_batch_size: int,
    delay_us: int,
    parameters: Mapping[str, str] | None = None,
    device: str = "KIND_CPU",
) -> str:
    """Return config.pbtxt of a model with dynamic batching.

    Args:
        name: of the model and of its folder.
        backend: onnxruntime, tensorrt or python.
        inputs: of a request.
        outputs: of a request.
        max_batch_size: samples per call.
        delay_us: microseconds that a request waits for others.
        parameters: for the backend, or for the Python model.
        device: KIND_CPU or KIND_GPU.
    """
    said: dict[str, Any] = {
        "name": name,
        "backend": backend,
        "max_batch_size": max_batch_size,
        "input": [_tensor_message(one) for one in inputs],
        "output": [_tensor_message(one) for one in outputs],
        "dynamic_batching": {"max_queue_delay_microseconds": delay_us},
        "instance_group": [{"count": 1, "kind": EnumValue(device)}],
        "parameters": [
            {"key": key, "value": {"string_value": value}} for key, value in (parameters or {}).items()
        ],
    }
    return "".join(_lines(said, 0))


def _tensor_message(one: TritonTensor) -> dict[str, Any]:
    return {"name": one.name, "data_type": EnumValue(one.kind), "dims": list(one.dims)}


def _lines(message: Mapping[str, Any], deep: int) -> list[str]:
    """Return the fields of a message; a list is a repeated field, a mapping a nested message."""
    lines = []
    for field, value in message.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                lines += [f"{'  ' * deep}{field} {{\n", *_lines(one, deep + 1), f"{'  ' * deep}}}\n"]
            else:
                shown = one.name if isinstance(one, EnumValue) else json.dumps(one, ensure_ascii=False)
                lines.append(f"{'  ' * deep}{field}: {shown}\n")
    return lines
