"""config.pbtxt in protobuf's text format.

Source: triton-inference-server/common, protobuf/model_config.proto (message ModelConfig).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Word:
    """A word of an enum, which the text format has without quotation marks."""

    said: str


@dataclass(frozen=True)
class Tensor:
    """An input or output: name, DataType (TYPE_INT64), dimensions without the batch's (-1: any)."""

    name: str
    kind: str
    dims: tuple[int, ...]


def model_config(
    name: str,
    backend: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    max_batch_size: int,
    delay_us: int,
    parameters: Mapping[str, str] | None = None,
    device: str = "KIND_CPU",
) -> str:
    """Return config.pbtxt of a model that gathers requests into batches.

    Args:
        name: of the model and of its folder.
        backend: onnxruntime, tensorrt or python.
        inputs: what a request gives.
        outputs: what it gets.
        max_batch_size: rows of one call.
        delay_us: microseconds that a request waits for others.
        parameters: handed to the backend, or to the model in Python.
        device: KIND_CPU or KIND_GPU.
    """
    said: dict[str, Any] = {
        "name": name,
        "backend": backend,
        "max_batch_size": max_batch_size,
        "input": [_tensor(one) for one in inputs],
        "output": [_tensor(one) for one in outputs],
        "dynamic_batching": {"max_queue_delay_microseconds": delay_us},
        "instance_group": [{"count": 1, "kind": Word(device)}],
        "parameters": [
            {"key": key, "value": {"string_value": value}} for key, value in (parameters or {}).items()
        ],
    }
    return "".join(_lines(said, 0))


def _tensor(one: Tensor) -> dict[str, Any]:
    return {"name": one.name, "data_type": Word(one.kind), "dims": list(one.dims)}


def _lines(message: Mapping[str, Any], deep: int) -> list[str]:
    """Return the fields of a message; a list is a repeated field, a mapping a message in it."""
    lines = []
    for field, value in message.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                lines += [f"{'  ' * deep}{field} {{\n", *_lines(one, deep + 1), f"{'  ' * deep}}}\n"]
            else:
                shown = one.said if isinstance(one, Word) else json.dumps(one, ensure_ascii=False)
                lines.append(f"{'  ' * deep}{field}: {shown}\n")
    return lines
