"""A stand-in for `tensorrt` at run time: it records every call and computes with ONNX Runtime.

A plan of it names an ONNX file and the profile's shapes. `execute_async_v3` reads the inputs from the
addresses that were set and writes the outputs to theirs, as TensorRT does, so that a wrong address, a
wrong shape or a freed buffer gives a wrong result. Names and signatures are those of the bindings of
11.4; test_tensorrt_engine.py compares them with the real ones where the rig is.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

_TYPES = {
    "tensor(float)": ("FLOAT", np.float32), "tensor(float16)": ("HALF", np.float16),
    "tensor(int64)": ("INT64", np.int64), "tensor(int32)": ("INT32", np.int32),
    "tensor(bool)": ("BOOL", np.bool_), "tensor(double)": ("DOUBLE", np.float64),
}  # fmt: skip
STREAM = 4711


def write_plan(onnx: Path, shapes: Any, plan: Path) -> None:
    """Write the "engine" of an ONNX file; shapes: those of its profile, or a list of several."""
    plan.write_text(json.dumps({"onnx": str(onnx.resolve()), "shapes": shapes}))


class Module:
    """What `import tensorrt` gives. calls: (method, its arguments), in order."""

    __name__ = "tensorrt"
    __version__ = "11.4.0"
    TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")
    TensorLocation = SimpleNamespace(DEVICE="device", HOST="host")

    class ILogger:
        """Severities only; the messages come from the fake itself."""

        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

        def log(self, severity: int, message: str) -> None: ...

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        self.runtime = SimpleNamespace(
            deserialize_cuda_engine=lambda plan: self._deserialize(plan, logger),
            engine_host_code_allowed=False,
        )
        return self.runtime

    def Refitter(self, engine: Any, logger: Any) -> Any:  # noqa: N802
        return Refitter(self)

    def OnnxParserRefitter(self, refitter: Any, logger: Any) -> Any:  # noqa: N802
        return OnnxParserRefitter(self)

    def _deserialize(self, plan: bytes, logger: Any) -> Any:
        self.calls.append(("deserialize_cuda_engine",))
        try:
            content = json.loads(plan)
        except ValueError:
            logger.log(self.ILogger.ERROR, "Serialization assertion magicTagRead == kMAGIC_TAG failed")
            return None
        if "warning" in self.answers:
            logger.log(self.ILogger.WARNING, self.answers["warning"])
        return Engine(self, content["onnx"], content["shapes"], logger)


class Refitter:
    """`Refitter`: what gives an engine its weights."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def refit_cuda_engine(self) -> bool:
        self.module.calls.append(("refit_cuda_engine",))
        return bool(self.module.answers.get("refit_cuda_engine", True))


class OnnxParserRefitter:
    """`OnnxParserRefitter`: what reads them from a graph."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def refit_from_file(self, model: str) -> bool:
        self.module.calls.append(("refit_from_file", Path(model).name))
        return bool(self.module.answers.get("refit_from_file", True))


class Engine:
    """`ICudaEngine` over an ONNX Runtime session."""

    def __init__(self, module: Module, onnx: str, shapes: Any, logger: Any) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        self.module, self.logger = module, logger
        self.profiles = shapes if isinstance(shapes, list) else [shapes]
        self.num_optimization_profiles = len(self.profiles)
        self.tensors = {t.name: t for t in (*self.session.get_inputs(), *self.session.get_outputs())}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in [t.name for t in self.session.get_inputs()] else "output"

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=_TYPES[self.tensors[name].type][0])

    def get_tensor_location(self, name: str) -> str:
        scalar = not self.tensors[name].shape  # the graph's scalars decide shapes
        return str(self.module.answers.get("location", "host" if scalar else "device"))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(n if isinstance(n, int) else -1 for n in self.tensors[name].shape)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.profiles[profile_index][name]]

    def create_execution_context(self) -> Any:
        response = self.module.answers.get("create_execution_context", ...)
        return Context(self) if response is ... else response


class Context:
    """`IExecutionContext`; an entry of `Module.answers` under a method's name is what that one returns."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.module = engine, engine.module
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.profile = 0
        self.addresses: dict[str, int] = {}
        self.outputs: dict[str, Any] = {}

    def _answer(self, method: str, *arguments: Any) -> Any:
        self.module.calls.append((method, *arguments))
        response = self.module.answers.get(method, True)
        if isinstance(response, Exception):
            raise response
        return response

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profile = profile_index
        return bool(self._answer("set_optimization_profile_async", profile_index, stream_handle))

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        allowed = self._answer("set_input_shape", name, shape)
        limits = self.engine.profiles[self.profile].get(name)
        if limits is not None and shape:  # of a scalar they are of its value
            minimum, _, maximum = limits
            inside = [low <= n <= high for low, n, high in zip(minimum, shape, maximum, strict=True)]
            allowed = allowed and all(inside)
        self.shapes[name] = shape
        return bool(allowed)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        assert memory != 0, f"{name} has no address"
        return bool(self._answer("set_tensor_address", name))

    def infer_shapes(self) -> list[str]:
        response = self._answer("infer_shapes")
        profile = self.engine.profiles[self.profile]
        for name in (n for n, shape in self.shapes.items() if not shape and n in profile):
            (minimum,), _, (maximum,) = profile[name]
            assert minimum <= self._read(name) <= maximum, f"{name} is outside of its profile"
        self._compute()  # ONNX Runtime tells shapes only by computing
        return [] if response is True else list(response)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        response = self._answer("get_tensor_shape", name)
        return tuple(self.outputs[name].shape) if response is True else tuple(response)

    def execute_async_v3(self, stream_handle: int) -> bool:
        if not self._answer("execute_async_v3", stream_handle):
            self.engine.logger.log(self.module.ILogger.ERROR, "Cuda failure: an illegal memory access")
            return False
        self._compute()
        for name, value in self.outputs.items():
            ctypes.memmove(self.addresses[name], value.tobytes(), value.nbytes)
        return True

    def _compute(self) -> None:
        feeds = {t.name: self._read(t.name) for t in self.engine.session.get_inputs()}
        names = [t.name for t in self.engine.session.get_outputs()]
        self.outputs = dict(zip(names, self.engine.session.run(names, feeds), strict=True))

    def _read(self, name: str) -> Any:
        kind = np.dtype(_TYPES[self.engine.tensors[name].type][1])
        count = int(np.prod(self.shapes[name]))
        raw = ctypes.string_at(self.addresses[name], count * kind.itemsize)
        return np.frombuffer(raw, kind).reshape(self.shapes[name])


SURFACE = (Engine, Context, Refitter, OnnxParserRefitter)
"""What is compared with the real bindings."""
