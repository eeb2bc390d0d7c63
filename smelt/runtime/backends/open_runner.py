"""Opens an artifact: its format selects the runtime, its model the runner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, default_threads
from smelt.core.errors import InputError
from smelt.core.labels import CLASSIFIER_SUFFIXES
from smelt.families.registry import reads_images
from smelt.runtime.backends.registry import find_runtime
from smelt.runtime.causal import is_causal
from smelt.runtime.classifier import ClassifierRunner
from smelt.runtime.embedder import EmbedderRunner
from smelt.runtime.generate.decoder_only_runner import DecoderOnlyRunner
from smelt.runtime.generate.encoder_decoder_runner import EncoderDecoderRunner
from smelt.runtime.generate.generation_loop import generate_resolved
from smelt.runtime.generate.graph_generation import generate_in_graph
from smelt.runtime.images.image_classifier import ImageClassifierRunner
from smelt.runtime.runner import Runner, read_model_files
from smelt.runtime.text.sentence_files import MODULES_FILE
from smelt.runtime.third_party.graph_runner import GraphRunner
from smelt.runtime.third_party.signature import SIGNATURE_FILE as SIGNATURE


def open_runner(artifact: Artifact, threads: int | None = None, device: str = "auto") -> Runner:
    """Load `artifact` in the runtime of its format and target, on `device` (see device.py).

    Without `threads` it uses the number stored in the artifact, else the runtime's default.

    Raises:
        InputError: no runner for this format, or cuda is requested and not available.
        MissingDependencyError: the runtime is not installed.
    """
    details = artifact.manifest.details
    count = default_threads(artifact.manifest) if threads is None else threads
    return open_folder(
        artifact.path,
        artifact.format,
        details.get("target"),
        count,
        device,
        details.get("dtype"),
        tf32=details.get("tf32") is True,
    )


def open_folder(
    folder: Path,
    artifact_format: str,
    target: str | None = None,
    threads: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    tf32: bool = False,
) -> Runner:
    """Load a folder that is not an artifact yet, whose format, target and dtype are given; see `open_runner`.

    tf32: on CUDA, let float32 matrix multiplications use TF32, as the artifact's setting; never when a graph
    is compared with its model.
    """
    try:
        runtime = find_runtime(artifact_format, target)
    except InputError as error:
        raise InputError(f"{folder}: {error}", code=error.code) from error
    files = read_model_files(folder)
    kind: Any = runner_class_for(files.config, embeds=(folder / MODULES_FILE).is_file())
    kind = GraphRunner if (folder / SIGNATURE).is_file() else kind
    backend = runtime.load_backend()(
        folder, kind.graphs, target, threads, device, dtype, **({"tf32": True} if tf32 else {})
    )
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
):
    """Return the runner class for a model with this config (config.json).

    embeds: whether its folder has the files of a sentence embedder.
    """
    if reads_images(config):
        return ImageClassifierRunner
    if is_causal(config):
        return DecoderOnlyRunner
    classifies = any(str(name).endswith(CLASSIFIER_SUFFIXES) for name in config.get("architectures") or ())
    if embeds and not classifies:
        return EmbedderRunner
    return EncoderDecoderRunner if config.get("is_encoder_decoder") and not classifies else ClassifierRunner
