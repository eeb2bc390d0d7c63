"""What runs a model, whatever lies underneath.

Shapes: B = batch, R = rows, V = vocabulary, C = classes.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.text.tools import TextTools


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
