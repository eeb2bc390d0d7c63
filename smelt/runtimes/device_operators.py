"""Operators on values of the device that holds them: only indices and results cross the bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime

from smelt.generation.backend import Tokens, TopLogits
from smelt.runtimes.onnx_session import cuda_provider_config

_OPSET, _IR_VERSION = 20, 9


class DeviceOperators:
    """Operators of ONNX Runtime for OrtValues; one session for each operator and type.

    Args:
        device: cuda, or cpu, which computes the same.
        device_id: of the GPU.
    """

    def __init__(self, device: str, device_id: int) -> None:
        self._device, self._device_id = device, device_id
        self._sessions: dict[tuple[str, int], Any] = {}

    def gather(self, value: Any, rows: Tokens) -> Any:
        """Return an OrtValue with row rows[i] of `value` [R, ...] as row i; rows: int64."""
        session = self._session(_gather_graph, value)
        binding = session.io_binding()
        binding.bind_ortvalue_input("values", value)
        binding.bind_cpu_input("rows", np.ascontiguousarray(rows))
        binding.bind_output("selected", self._device, self._device_id)
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0]

    def top_logits(self, logits: Any, count: int) -> TopLogits:
        """Return the `count` highest of float32 `logits` [R, V], or of the last token of [R, S, V]."""
        session = self._session(_top_graph, logits)
        binding = session.io_binding()
        binding.bind_ortvalue_input("logits", logits)
        binding.bind_cpu_input("count", np.array([min(count, logits.shape()[-1])], dtype=np.int64))
        for name in ("values", "tokens", "log_probs"):
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        values, tokens, log_probs = (value.numpy() for value in binding.get_outputs())
        return TopLogits(values, tokens, log_probs)

    def _session(self, make_graph: Callable[[str, int], Any], value: Any) -> Any:
        kind, rank = value.data_type(), len(value.shape())
        key = f"{make_graph.__name__} {kind}", rank
        if key not in self._sessions:
            from onnx import helper

            providers: list[Any] = [cuda_provider_config()] if self._device == "cuda" else []
            graph = make_graph(kind.removeprefix("tensor(").removesuffix(")"), rank)
            opsets = [helper.make_opsetid("", _OPSET)]
            model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
            self._sessions[key] = onnxruntime.InferenceSession(
                model.SerializeToString(), providers=[*providers, "CPUExecutionProvider"]
            )
        return self._sessions[key]


def _gather_graph(kind: str, rank: int) -> Any:
    """Return a graph of one Gather for values of the type `kind`, such as float16, of any rank."""
    from onnx import TensorProto, helper

    number = TensorProto.DataType.Value(kind.upper())
    node = helper.make_node("Gather", ["values", "rows"], ["selected"], axis=0)
    inputs = [
        helper.make_tensor_value_info("values", number, None),
        helper.make_tensor_value_info("rows", TensorProto.INT64, ["rows"]),
    ]
    output = helper.make_tensor_value_info("selected", number, None)
    return helper.make_graph([node], "gather", inputs, [output])


def _top_graph(kind: str, rank: int) -> Any:
    """Return a graph of the best tokens, their logits and their log-probabilities."""
    from onnx import TensorProto, helper, numpy_helper

    node, number = helper.make_node, TensorProto.DataType.Value(kind.upper())
    last = [node("Gather", ["logits", "last"], ["row_logits"], axis=1)] if rank == 3 else []
    logits = "row_logits" if last else "logits"
    nodes = [
        *last,
        node("TopK", [logits, "count"], ["values", "tokens"], axis=-1),
        node("LogSoftmax", [logits], ["all_log_probs"], axis=-1),
        node("GatherElements", ["all_log_probs", "tokens"], ["log_probs"], axis=-1),
    ]
    inputs = [
        helper.make_tensor_value_info("logits", number, [None] * rank),
        helper.make_tensor_value_info("count", TensorProto.INT64, [1]),
    ]
    kinds = {"values": number, "tokens": TensorProto.INT64, "log_probs": number}
    outputs = [helper.make_tensor_value_info(name, each, [None, None]) for name, each in kinds.items()]
    constants = [numpy_helper.from_array(np.array(-1), "last")] if last else []
    return helper.make_graph(nodes, "top", inputs, outputs, constants)
