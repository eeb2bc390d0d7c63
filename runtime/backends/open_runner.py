"""Opening an artifact: the runtime is chosen by its format, what is fed when by what its model is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, threads_of
from smelt.core.errors import InputError
from smelt.core.labels import CLASSIFIERS
from smelt.families.registry import reads_images
from smelt.runtime.backends.registry import find_runtime
from smelt.runtime.causal import is_causal
from smelt.runtime.classifier import Classifier
from smelt.runtime.embedder import Embedder
from smelt.runtime.foreign.runner import GraphRunner
from smelt.runtime.foreign.signature import FILE as SIGNATURE
from smelt.runtime.generate.decoder_only import DecoderOnly
from smelt.runtime.generate.encoder_decoder import EncoderDecoder
from smelt.runtime.generate.in_graph import generate_in_graph
from smelt.runtime.generate.loop import generate_with
from smelt.runtime.images.runner import ImageClassifier
from smelt.runtime.runner import Runner, read_files
from smelt.runtime.text.sentence_files import MODULES


def open_runner(artifact: Artifact, threads: int | None = None, device: str = "auto") -> Runner:
    """Load `artifact` in the runtime that its format and target ask for, on `device` (see device.py).

    Without `threads` it takes those that are written into it, else as many as the runtime likes.

    Raises:
        InputError: no runner for this format, or cuda is asked for and there is none.
        MissingDependencyError: the runtime is not installed.
    """
    details = artifact.manifest.details
    count = threads_of(artifact.manifest) if threads is None else threads
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
    made: str,
    target: str | None = None,
    threads: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    tf32: bool = False,
) -> Runner:
    """As `open_runner`, for a folder that is not an artifact yet, whose format, target and dtype are given.

    tf32: on CUDA, let float32 matrix multiplications use TF32, as the artifact's setting says; never in a
    comparison of a graph with its model.
    """
    try:
        runtime = find_runtime(made, target)
    except InputError as error:
        raise InputError(f"{folder}: {error}", code=error.code) from error
    files = read_files(folder)
    kind: Any = runner_for(files.config, embeds=(folder / MODULES).is_file())
    kind = GraphRunner if (folder / SIGNATURE).is_file() else kind
    backend = runtime.load()(
        folder, kind.graphs, target, threads, device, dtype, **({"tf32": True} if tf32 else {})
    )
    runner: Runner = kind(files, backend, generate_in_graph if backend.whole else generate_with)
    return runner


def runner_for(
    config: Mapping[str, Any], embeds: bool = False
) -> type[Classifier] | type[Embedder] | type[EncoderDecoder] | type[DecoderOnly] | type[ImageClassifier]:
    """Return what knows how to feed a model with this config (config.json).

    embeds: its folder says how it makes vectors of texts.
    """
    if reads_images(config):
        return ImageClassifier
    if is_causal(config):
        return DecoderOnly
    classifies = any(str(name).endswith(CLASSIFIERS) for name in config.get("architectures") or ())
    if embeds and not classifies:
        return Embedder
    return EncoderDecoder if config.get("is_encoder_decoder") and not classifies else Classifier
