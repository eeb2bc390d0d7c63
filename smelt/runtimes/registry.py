"""The runtimes of smelt, and opening of artifacts: the format selects the runtime, the model the runner.

A new runtime is a file and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, Format, default_threads
from smelt.core.errors import InputError
from smelt.data.labels import has_classifier
from smelt.generation.backend import BackendFactory
from smelt.generation.generating_runners import (
    DecoderOnlyRunner,
    EncoderDecoderRunner,
    SpeechRunner,
    is_causal,
)
from smelt.generation.runner import Runner, read_model_files
from smelt.generation.search import generate_in_graph, generate_resolved
from smelt.models.families.registry import reads_audio, reads_images, reads_images_and_texts
from smelt.models.text_rules import MODULES_FILE
from smelt.runtimes.device import DeviceType, onnx_device, torch_device
from smelt.runtimes.fixed_shapes import FixedShapeBackend, read_fixed_shape
from smelt.runtimes.image_text import ImageTextRunner
from smelt.runtimes.images import ImageClassifierRunner
from smelt.runtimes.onnx_import.signature import SIGNATURE_FILE as SIGNATURE
from smelt.runtimes.ort_tensorrt_provider import provider_device
from smelt.runtimes.single_call_runners import ClassifierRunner, EmbedderRunner, GraphRunner


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
        factory: BackendFactory = getattr(import_module(module), name)
        return factory


def _torch_place(wanted: str, target: str | None) -> DeviceType:
    return torch_device(wanted)


_HERE = "smelt.runtimes"
RUNTIMES: tuple[RuntimeSpec, ...] = (
    RuntimeSpec("torch", f"{_HERE}.torch_backend:TorchBackend", ("torch", "transformers"), _torch_place),
    RuntimeSpec("onnx", f"{_HERE}.onnx_backend:OnnxBackend", ("onnxruntime-gpu", "onnxruntime"), onnx_device),
    RuntimeSpec("onnx", f"{_HERE}.openvino_backend:OpenvinoBackend", ("openvino",), "cpu", target="openvino"),
    RuntimeSpec(
        "onnx",
        f"{_HERE}.ort_tensorrt_backend:OrtTensorrtBackend",
        ("onnxruntime-gpu", "onnxruntime", "tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        provider_device,
        max_concurrent_calls=1,
        target="ort-tensorrt",
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


# a graph of arrays repeats samples itself, and caches have no fixed shape
_SINGLE_CALL_RUNNERS: tuple[type[Runner], ...] = (ClassifierRunner, EmbedderRunner, ImageClassifierRunner)


def find_runtime(artifact_format: str, target: str | None) -> RuntimeSpec:
    """Return the runtime of artifacts in the format `artifact_format` that were exported for `target`.

    Raises:
        InputError: there is none.
    """
    same_format = [runtime for runtime in RUNTIMES if runtime.format == artifact_format]
    matching = [r for r in same_format if r.target == target] or [r for r in same_format if r.target is None]
    if not matching:
        known_formats = ", ".join(dict.fromkeys(runtime.format for runtime in RUNTIMES))
        raise InputError(
            f"unknown artifact format '{artifact_format}'; known formats: {known_formats}.",
            code="unknown-format",
        )
    return matching[0]


def runtime_target(details: Mapping[str, Any], requested: str) -> str | None:
    """Return the target whose runtime runs an artifact, given its manifest's `details`.

    It is the target that it was exported for. Float graphs of third parties were exported for none: they run
    on CUDA if `requested` (auto, cpu, cuda) and the machine allow it, as the engines that are built from
    them do. Quantized ones have integer operators, for which ONNX Runtime's CUDA provider has no kernels.

    Raises:
        MissingDependencyError: cuda is requested, and this ONNX Runtime has no provider for it.
    """
    target: str | None = details.get("target")
    is_float = not ("scheme" in details or details.get("codes"))
    if details.get("foreign") and target == "ort-cpu" and is_float:
        return "ort-cuda" if onnx_device(requested, "ort-cuda") == "cuda" else target
    return target


def open_runner(
    artifact: Artifact, threads: int | None = None, device: str = "auto", workers: int = 1
) -> Runner:
    """Load `artifact` in the runtime of its format and target, on `device`, see `smelt.runtimes.device`.

    Without `threads` it uses the number stored in the artifact, else the runtime's default. `workers` batches
    of a call are computed at the same time, if the runtime supports as many concurrent calls.

    Raises:
        InputError: no runner for this format, or cuda is requested and not available.
        MissingDependencyError: the runtime is not installed.
    """
    details = artifact.manifest.details
    count = default_threads(artifact.manifest) if threads is None else threads
    runner = open_folder(
        artifact.path,
        artifact.format,
        runtime_target(details, device),
        count,
        device,
        details.get("dtype"),
        tf32=details.get("tf32") is True,
        cuda_graph=details.get("cuda_graph") is True,
    )
    most = find_runtime(artifact.format, details.get("target")).max_concurrent_calls
    runner.workers = min(workers, most or workers)
    return runner


def open_folder(
    folder: Path,
    artifact_format: str,
    target: str | None = None,
    threads: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    tf32: bool = False,
    cuda_graph: bool = False,
) -> Runner:
    """Load a folder that is not an artifact yet, whose format, target and dtype are given; see `open_runner`.

    tf32: on CUDA, let float32 matrix multiplications use TF32, as the artifact's setting; never when a graph
    is compared with its model. cuda_graph: on CUDA, run graphs of fixed shapes as CUDA graphs.
    """
    try:
        runtime = find_runtime(artifact_format, target)
    except InputError as error:
        raise InputError(f"{folder}: {error}", code=error.code) from error
    files = read_model_files(folder)
    kind: Any = runner_class_for(files.config, embeds=(folder / MODULES_FILE).is_file())
    kind = GraphRunner if (folder / SIGNATURE).is_file() else kind
    options = {name: True for name, on in (("tf32", tf32), ("cuda_graph", cuda_graph)) if on}
    backend: Any = runtime.load_backend()(folder, kind.graphs, target, threads, device, dtype, **options)
    if runtime.format == "onnx" and runtime.target != "ort-tensorrt" and kind in _SINGLE_CALL_RUNNERS:
        shape = read_fixed_shape(backend.input_shapes(kind.graphs.main.name))
        pad = files.config.get("pad_token_id") or 0
        backend = FixedShapeBackend(backend, shape, pad) if shape else backend
    runner: Runner = kind(
        files, backend, generate_in_graph if backend.generation_graphs else generate_resolved
    )
    return runner


def runner_class_for(
    config: Mapping[str, Any], embeds: bool = False
) -> (
    type[ClassifierRunner]
    | type[EmbedderRunner]
    | type[EncoderDecoderRunner]
    | type[DecoderOnlyRunner]
    | type[ImageClassifierRunner]
    | type[ImageTextRunner]
):
    """Return the runner class for a model with this config (config.json).

    embeds: whether its folder has the files of a sentence embedder.
    """
    if reads_images(config):
        return ImageClassifierRunner
    if reads_images_and_texts(config):
        return ImageTextRunner
    if reads_audio(config):
        return SpeechRunner
    if is_causal(config):
        return DecoderOnlyRunner
    classifies = has_classifier(config)
    if embeds and not classifies:
        return EmbedderRunner
    return EncoderDecoderRunner if config.get("is_encoder_decoder") and not classifies else ClassifierRunner
