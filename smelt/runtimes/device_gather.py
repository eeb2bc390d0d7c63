"""Select rows of values on the device that holds them: only the indices cross the bus."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from smelt.generation.backend import Tokens
from smelt.runtimes.onnx_session import cuda_provider_config

_OPSET, _IR_VERSION = 20, 9


class DeviceGather:
    """A Gather of ONNX Runtime for OrtValues of any type; one session for each type.

    Args:
        device: cuda, or cpu, which computes the same.
        device_id: of the GPU.
    """

    def __init__(self, device: str, device_id: int) -> None:
        self._device, self._device_id = device, device_id
        self._sessions: dict[str, Any] = {}

    def __call__(self, value: Any, rows: Tokens) -> Any:
        """Return an OrtValue with row rows[i] of `value` [R, ...] as row i; rows: int64."""
        binding = self._session(value.data_type()).io_binding()
        binding.bind_ortvalue_input("values", value)
        binding.bind_cpu_input("rows", np.ascontiguousarray(rows))
        binding.bind_output("selected", self._device, self._device_id)
        self._session(value.data_type()).run_with_iobinding(binding)
        return binding.get_outputs()[0]

    def _session(self, kind: str) -> Any:
        if kind not in self._sessions:
            providers: list[Any] = [cuda_provider_config()] if self._device == "cuda" else []
            self._sessions[kind] = onnxruntime.InferenceSession(
                _gather_model(kind), providers=[*providers, "CPUExecutionProvider"]
            )
        return self._sessions[kind]


def _gather_model(kind: str) -> bytes:
    """Return a model of one Gather for `kind`, such as tensor(float16)."""
    from onnx import TensorProto, helper

    number = TensorProto.DataType.Value(kind.removeprefix("tensor(").removesuffix(")").upper())
    node = helper.make_node("Gather", ["values", "rows"], ["selected"], axis=0)
    inputs = [
        helper.make_tensor_value_info("values", number, None),
        helper.make_tensor_value_info("rows", TensorProto.INT64, ["rows"]),
    ]
    output = helper.make_tensor_value_info("selected", number, None)
    graph = helper.make_graph([node], "gather", inputs, [output])
    opsets = [helper.make_opsetid("", _OPSET)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION).SerializeToString()
    return model
