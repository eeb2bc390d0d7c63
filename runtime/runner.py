"""What runs a model, whatever lies underneath.

Shapes: B = batch, L = tokens of the longest row, R = rows, S = tokens fed at once, V = vocabulary,
C = classes, D = numbers of a text's vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.runtime.backends.backend import Backend, Feeds
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.generate.decoding import Decoding
from smelt.runtime.text.limits import NO_LIMIT, lower_position_limit
from smelt.runtime.text.tools import TextTools


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder and what its two config files say, as dicts."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]


def read_files(folder: Path) -> ModelFiles:
    """Read the config files in `folder`; a file that is not there says nothing.

    Raises:
        InputError: one of them is no JSON.
    """
    return ModelFiles(folder, read_json(folder / "config.json"), read_json(folder / "generation_config.json"))


class Generator(Protocol):
    """Makes texts of a batch of encoded ones, wherever the loop over their tokens runs.

    `generate_with` (`runtime/generate/loop.py`) asks `runner` for step after step; `generate_in_graph`
    (`runtime/generate/in_graph.py`) asks once, for a graph that holds the whole loop.
    """

    def __call__(self, runner: Runner, batch: Batch, decoding: Decoding, part: int = 0) -> list[list[int]]:
        """Return each row's new tokens, the one that ends it too; `part` is the number of the batch."""


class Runner(Protocol):
    """A loaded model: its files, and the backend that has opened its graphs. A context manager.

    What is fed when is said by those that implement it: `Classifier`, `Embedder`,
    `EncoderDecoder`, `DecoderOnly`.

    config: the model's Hugging Face config as a dict; generation_config likewise. text: what turns texts
    into batches and tokens into texts. generator: what `smelt.load(...).generate` calls.
    searches: what a generator wants to keep from call to call.
    """

    in_pieces: ClassVar[bool] = False
    """Whether a text that is longer than what one call takes is fed in several."""
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    text: TextTools
    backend: Backend
    generator: Generator
    searches: dict[Any, Any]

    def __init__(self, files: ModelFiles, backend: Backend, generator: Generator) -> None:
        self.folder, self.config = files.folder, files.config
        self.generation_config = files.generation_config
        self.backend, self.generator = backend, generator
        self.searches = {}
        most = backend.at_once
        if self.in_pieces:
            most = None
            if backend.in_all is not None:  # a text may be as long as model and runtime both allow
                lower_position_limit(self.config, backend.in_all)
        # where texts are longer than one call takes, they are cut, and counted, where all others are
        self.text = TextTools(self.folder, self.config, self.generation_config, most or NO_LIMIT)

    @property
    def name(self) -> str:
        """The runtime's name; with `version` and `device` part of every score's key."""
        return self.backend.name

    @property
    def version(self) -> str:
        """The runtime's version."""
        return self.backend.version

    @property
    def device(self) -> str:
        """Where it runs: cpu or cuda."""
        return self.backend.device

    def forward(self, batch: Batch) -> Logits:
        """Return class logits, float32 [B, C]; of a decoder-only model those of all tokens, [B, L, V].

        Of a sentence embedder the vectors of texts, [B, D].
        """
        raise InputError(
            f"{self.folder}: this model generates text; it does not classify.", code="does-not-classify"
        )

    def encode(self, batch: Batch) -> Any:
        """Take in a batch; return the state that `decode_step` continues from."""
        raise InputError(
            f"{self.folder}: this model classifies; it does not generate text.", code="does-not-generate"
        )

    def decode_step(self, state: Any, tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [R]), advance `state` in place, return float32 [R, V]."""
        raise InputError(
            f"{self.folder}: this model classifies; it does not generate text.", code="does-not-generate"
        )

    def sequences(self, graph: str, batch: Batch, feeds: Feeds) -> Tokens:
        """Run a graph that holds the whole loop; return int64 [B, T], each row's prompt and new tokens.

        Args:
            graph: one of the backend's `whole`.
            batch: what to begin with.
            feeds: how to search, see `runtime/generate/in_graph.py`.
        """
        source = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        found: Tokens = self.backend.call(graph, {**source, **feeds})["sequences"]
        return found

    def reorder(self, state: Any, rows: Tokens) -> Any:
        """Return the state whose row i is the row rows[i] (int64 [R]) of `state`, which is used up.

        Beam search repeats and drops beams with it; so R may differ from the rows before.
        """
        raise InputError(
            f"{self.folder}: this model classifies; it does not generate text.", code="does-not-generate"
        )

    def close(self) -> None:
        """Free the memory and the runtime's threads."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
