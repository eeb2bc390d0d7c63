"""Which runner runs an artifact: by its format, and by what its model is."""

from __future__ import annotations

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.runtime.causal import is_causal
from smelt.runtime.runner import Runner


def open_runner(artifact: Artifact, threads: int | None = None, device: str = "auto") -> Runner:
    """Load `artifact` in the runtime that its format and target ask for, on `device` (see device.py).

    Raises:
        InputError: no runner for this format, or cuda is asked for and there is none.
        MissingDependencyError: the runtime is not installed.
    """
    causal = is_causal(read_json(artifact.path / "config.json"))
    if artifact.format == "torch" and causal:
        from smelt.runtime.backends.torch_causal import TorchCausalRunner

        return TorchCausalRunner(artifact, threads, device)
    if artifact.format == "onnx" and causal:
        from smelt.runtime.backends.onnx_causal import OnnxCausalRunner

        return OnnxCausalRunner(artifact, threads, device)
    if artifact.format == "torch":
        from smelt.runtime.backends.torch_runner import TorchRunner

        return TorchRunner(artifact, threads, device)
    if artifact.format == "onnx":
        from smelt.runtime.backends.onnx_runner import OnnxRunner

        return OnnxRunner(artifact, threads, device)
    if artifact.format == "tensorrt" and causal:
        from smelt.runtime.backends.tensorrt_causal import TensorrtCausalRunner

        return TensorrtCausalRunner(artifact, threads)
    if artifact.format == "tensorrt":
        from smelt.runtime.backends.tensorrt_runner import TensorrtRunner

        return TensorrtRunner(artifact, threads)
    raise InputError(f"{artifact.path}: no runner for the format '{artifact.format}'.")
