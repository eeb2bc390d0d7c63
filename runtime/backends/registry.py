"""The runtimes that smelt knows. A new one is its file and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from smelt.core.artifact import Format
from smelt.core.errors import InputError
from smelt.runtime.backends.backend import Opens
from smelt.runtime.backends.device import Place, onnx_device, torch_device
from smelt.runtime.backends.ort_tensorrt.provider import place_of


@dataclass(frozen=True)
class Runtime:
    """What is known of a runtime without importing it.

    format: of the artifacts that it runs. opens: its `Backend`, "module:class", imported when one is opened.
    libraries: the packages whose versions are part of the key of a score. place: the device where it always
    works, or what chooses one by what was asked for (auto, cpu, cuda) and the artifact's target. calls: how
    many it serves at a time, None for any number. target: the artifacts of its format that it runs, None for
    those that no other runtime is for.
    """

    format: Format
    opens: str
    libraries: tuple[str, ...]
    place: Place | Callable[[str, str | None], Place]
    calls: int | None = None
    target: str | None = None

    def load(self) -> Opens:
        """Import the runtime; return what opens graphs in it."""
        module, name = self.opens.split(":")
        found: Opens = getattr(import_module(module), name)
        return found


def _torch(wanted: str, target: str | None) -> Place:
    return torch_device(wanted)


_HERE = "smelt.runtime.backends"
_IN_ORT = f"{_HERE}.ort_tensorrt.backend:OrtTensorrtBackend"
_ORT_LIBRARIES = ("onnxruntime-gpu", "onnxruntime", "tensorrt", "tensorrt-cu13", "tensorrt-cu12")
_RTX = "onnxruntime-ep-nv-tensorrt-rtx"
_RTX_LIBRARIES = ("onnxruntime-gpu", "onnxruntime", _RTX, f"{_RTX}-cu13", f"{_RTX}-cu12")
RUNTIMES: tuple[Runtime, ...] = (
    Runtime("torch", f"{_HERE}.torch_backend:TorchBackend", ("torch", "transformers"), _torch),
    Runtime("onnx", f"{_HERE}.onnx_backend:OnnxBackend", ("onnxruntime-gpu", "onnxruntime"), onnx_device),
    Runtime("onnx", f"{_HERE}.openvino_backend:OpenvinoBackend", ("openvino",), "cpu", target="openvino"),
    Runtime("onnx", _IN_ORT, _ORT_LIBRARIES, place_of, calls=1, target="ort-tensorrt"),
    Runtime("onnx", _IN_ORT, _RTX_LIBRARIES, place_of, calls=1, target="ort-tensorrt-rtx"),
    # an engine's execution context and its stream serve one thread at a time
    Runtime(
        "tensorrt", f"{_HERE}.tensorrt_backend:TensorrtBackend", ("tensorrt", "tensorrt-rtx"), "cuda", calls=1
    ),
)


def find_runtime(made: str, target: str | None) -> Runtime:
    """Return what runs artifacts of the format `made` that were exported for `target`.

    Raises:
        InputError: nothing does.
    """
    fitting = [runtime for runtime in RUNTIMES if runtime.format == made]
    found = [r for r in fitting if r.target == target] or [r for r in fitting if r.target is None]
    if not found:
        known = ", ".join(dict.fromkeys(runtime.format for runtime in RUNTIMES))
        raise InputError(
            f"no runner for the format '{made}'; there are some for {known}.", code="unknown-format"
        )
    return found[0]
