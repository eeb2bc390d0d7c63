"""What runs a model, whatever lies underneath.

Shapes: B = batch, L = source length, V = vocabulary, C = classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.runtime.text.tools import TextTools

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Tokenized texts, padded on the right.

    input_ids: int64 [B, L]; attention_mask: int64 [B, L], 1 where a token is; token_type_ids:
    int64 [B, L] for text pairs, else None.
    """

    input_ids: Tokens
    attention_mask: Tokens
    token_type_ids: Tokens | None = None


class Runner(Protocol):
    """A loaded artifact. A context manager: leaving it frees the memory.

    name and version (for example onnxruntime 1.31.1) are part of every score's key, as is the device,
    cpu or cuda.
    config: the model's Hugging Face config as a dict; generation_config likewise. text: what turns texts
    into batches and tokens into texts.
    """

    name: str
    version: str
    folder: Any
    config: dict[str, Any]
    generation_config: dict[str, Any]
    text: TextTools

    @property
    def device(self) -> str:
        """Where it runs: cpu or cuda."""

    def forward(self, batch: Batch) -> Logits:
        """Return class logits, float32 [B, C]. Only for classifiers."""

    def encode(self, batch: Batch) -> Any:
        """Run the encoder; return the state that `decode_step` continues from. Only for seq2seq."""

    def decode_step(self, state: Any, tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [B]), advance `state` in place, return float32 [B, V]."""

    def reorder(self, state: Any, rows: Tokens) -> Any:
        """Return the state whose row i is the row rows[i] (int64 [R]) of `state`, which is used up.

        Beam search repeats and drops beams with it; so R may differ from the rows before.
        """

    def close(self) -> None:
        """Free the memory and the runtime's threads."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_runner(artifact: Artifact, threads: int | None = None, device: str = "auto") -> Runner:
    """Load `artifact` in the runtime that its format and target ask for, on `device` (see device.py).

    Raises:
        InputError: no runner for this format, or cuda is asked for and there is none.
        MissingDependencyError: the runtime is not installed.
    """
    causal = _is_causal(artifact)
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


def _is_causal(artifact: Artifact) -> bool:
    from smelt.core.files import read_json
    from smelt.runtime.causal import is_causal

    return is_causal(read_json(artifact.path / "config.json"))
