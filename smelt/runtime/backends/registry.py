"""The runtimes of smelt. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from smelt.core.artifact import Format
from smelt.core.errors import InputError
from smelt.runtime.backends.backend import BackendFactory
from smelt.runtime.backends.device import DeviceType, onnx_device, torch_device
from smelt.runtime.backends.ort_tensorrt.provider import provider_device


@dataclass(frozen=True)
class RuntimeSpec:
    """Properties of a runtime, known without importing it.

    format: of its artifacts. backend_class: its `Backend`, "module:class", imported when one is opened.
    libraries: the packages whose versions are part of the key of a score. device: its only device, or the
    function that selects one from the request (auto, cpu, cuda) and the artifact's target.
    max_concurrent_calls: number of concurrent calls, None for any number. target: the artifacts of its format
    that it runs, None for those of no other runtime.
    """

    format: Format
    backend_class: str
    libraries: tuple[str, ...]
    device: DeviceType | Callable[[str, str | None], DeviceType]
    max_concurrent_calls: int | None = None
    target: str | None = None

    def load_backend(self) -> BackendFactory:
        """Import the runtime; return the function that opens graphs in it."""
        module, name = self.backend_class.split(":")
        found: BackendFactory = getattr(import_module(module), name)
        return found


def _torch_place(wanted: str, target: str | None) -> DeviceType:
    return torch_device(wanted)


_HERE = "smelt.runtime.backends"
_IN_ORT = f"{_HERE}.ort_tensorrt.ort_tensorrt_backend:OrtTensorrtBackend"
_ORT_LIBRARIES = ("onnxruntime-gpu", "onnxruntime", "tensorrt", "tensorrt-cu13", "tensorrt-cu12")
_RTX = "onnxruntime-ep-nv-tensorrt-rtx"
_RTX_LIBRARIES = ("onnxruntime-gpu", "onnxruntime", _RTX, f"{_RTX}-cu13", f"{_RTX}-cu12")
RUNTIMES: tuple[RuntimeSpec, ...] = (
    RuntimeSpec("torch", f"{_HERE}.torch_backend:TorchBackend", ("torch", "transformers"), _torch_place),
    RuntimeSpec("onnx", f"{_HERE}.onnx_backend:OnnxBackend", ("onnxruntime-gpu", "onnxruntime"), onnx_device),
    RuntimeSpec("onnx", f"{_HERE}.openvino_backend:OpenvinoBackend", ("openvino",), "cpu", target="openvino"),
    RuntimeSpec(
        "onnx", _IN_ORT, _ORT_LIBRARIES, provider_device, max_concurrent_calls=1, target="ort-tensorrt"
    ),
    RuntimeSpec(
        "onnx", _IN_ORT, _RTX_LIBRARIES, provider_device, max_concurrent_calls=1, target="ort-tensorrt-rtx"
    ),
    # an engine's execution context and its stream support one thread at a time
    RuntimeSpec(
        "tensorrt",
        f"{_HERE}.tensorrt_backend:TensorrtBackend",
        ("tensorrt", "tensorrt-rtx"),
        "cuda",
        max_concurrent_calls=1,
    ),
)


def find_runtime(artifact_format: str, target: str | None) -> RuntimeSpec:
    """Return the runtime of artifacts in the format `artifact_format` that were exported for `target`.

    Raises:
        InputError: there is none.
    """
    fitting = [runtime for runtime in RUNTIMES if runtime.format == artifact_format]
    found = [r for r in fitting if r.target == target] or [r for r in fitting if r.target is None]
    if not found:
        known = ", ".join(dict.fromkeys(runtime.format for runtime in RUNTIMES))
        raise InputError(
            f"unknown artifact format '{artifact_format}'; known formats: {known}.",
            code="unknown-format",
        )
    return found[0]
