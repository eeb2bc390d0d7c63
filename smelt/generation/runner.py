"""The interface of loaded models, for every runtime.

Shapes: B = batch, L = tokens of the longest row, R = rows, S = input tokens of one call, V = vocabulary,
C = classes, D = dimension of a text's vector.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.generation.backend import Backend, Batch, Feeds, Logits, Tokens, TopLogits
from smelt.generation.config import GenerationConfig, GenerationSettings, resolve_generation
from smelt.models.text_rules import NO_LIMIT, lower_position_limit, max_input_length
from smelt.models.tokenizer import TextTokenizer, open_tokenizer


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder and its two config files, as dicts."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]


def read_model_files(folder: Path) -> ModelFiles:
    """Read the config files in `folder`; a missing file is an empty dict.

    Raises:
        InputError: one of them is not JSON.
    """
    return ModelFiles(
        folder, read_json_object(folder / "config.json"), read_json_object(folder / "generation_config.json")
    )


_MAX_CACHED = 64  # settings; a caller with new ones in every call must not fill the memory


class TextTools:
    """Created when an artifact is opened, filled at first use, shared by all threads.

    folder: of the tokenizer's files. config, generation_config: the model's, as dicts; a runner may
    have corrected them. most: the runtime's maximum number of tokens of a text, where that is less than the
    model's.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        most: int = NO_LIMIT,
    ) -> None:
        self.folder, self.config, self.generation_config = folder, config, generation_config
        self._most = most
        self._lock = threading.Lock()
        self._tokenizer: TextTokenizer | None = None
        self._decodings: dict[GenerationSettings, GenerationConfig] = {}

    @property
    def tokenizer(self) -> TextTokenizer:
        """Return the model's tokenizer.

        Raises:
            InputError: its files are missing or do not match.
        """
        if self._tokenizer is None:
            with self._lock:
                if self._tokenizer is None:
                    self._tokenizer = open_tokenizer(self.folder)
        return self._tokenizer

    @property
    def max_input_length(self) -> int:
        """Return the maximum number of tokens of a text."""
        return min(self._most, max_input_length(self.tokenizer, self.config))

    def resolved_generation(self, generation: GenerationSettings, runner: Any) -> GenerationConfig:
        """Return `generation` completed by the settings of the model of `runner`, whose tools these are.

        Raises:
            InputError: the generation config has a setting that smelt's loop does not support.
        """
        resolved = self._decodings.get(generation)
        if resolved is None:
            resolved = resolve_generation(generation, runner)
            if (
                len(self._decodings) < _MAX_CACHED
            ):  # a new dict, since another thread may be reading the old one
                self._decodings = {**self._decodings, generation: resolved}
        return resolved


class TokenGenerator(Protocol):
    """Generates texts for a batch of encoded ones, wherever the loop over their tokens runs.

    `generate_resolved` (`smelt/generation/search.py`) calls `runner` step by step;
    `generate_in_graph` (`smelt/generation/search.py`) calls a graph with the generation loop once.
    """

    def __call__(
        self, runner: Runner, batch: Batch, decoding: GenerationConfig, part: int = 0
    ) -> list[list[int]]:
        """Return each row's new tokens, including the final one; `part` is the number of the batch."""


class Runner(Protocol):
    """A loaded model: its files, and the backend that has opened its graphs. A context manager.

    Implementations: `ClassifierRunner`, `EmbedderRunner`, `EncoderDecoderRunner`, `DecoderOnlyRunner`.

    config: the model's Hugging Face config as a dict; generation_config likewise. text: converts texts
    to batches and tokens to texts. generator: called by `smelt.load(...).generate`.
    generation_cache: values that a generator keeps between calls. workers: number of batches of one call that
    are computed at the same time, each with its own threads.
    """

    chunked_prefill: ClassVar[bool] = False
    """Whether a text longer than one call's limit is processed in several calls."""
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    text: TextTools
    backend: Backend
    generator: TokenGenerator
    generation_cache: dict[Any, Any]
    workers: int = 1

    def __init__(self, files: ModelFiles, backend: Backend, generator: TokenGenerator) -> None:
        self.folder, self.config = files.folder, files.config
        self.generation_config = files.generation_config
        self.backend, self.generator = backend, generator
        self.generation_cache = {}
        most = backend.max_tokens_per_call
        if self.chunked_prefill:
            most = None
            if backend.max_total_tokens is not None:  # the limit is the smaller one of model and runtime
                lower_position_limit(self.config, backend.max_total_tokens)
        # texts longer than one call's limit are truncated, and counted, like those beyond the model's limit
        self.text = TextTools(self.folder, self.config, self.generation_config, most or NO_LIMIT)

    @property
    def name(self) -> str:
        """Return the runtime's name; with `version` and `device` part of every score's key."""
        return self.backend.name

    @property
    def version(self) -> str:
        """Return the runtime's version."""
        return self.backend.version

    @property
    def device(self) -> str:
        """Return the device: cpu or cuda."""
        return self.backend.device

    def forward(self, batch: Batch) -> Logits:
        """Return class logits, float32 [B, C]; for a decoder-only model those of all tokens, [B, L, V].

        For a sentence embedder the vectors of texts, [B, D].
        """
        raise InputError(
            f"{self.folder}: this model generates text and cannot classify. Use a classifier.",
            code="does-not-classify",
        )

    def _not_generating(self) -> InputError:
        return InputError(
            f"{self.folder}: this model is a classifier and cannot generate text. Use a model that"
            " generates text.",
            code="does-not-generate",
        )

    def encode(self, batch: Batch) -> Any:
        """Run the encoder or prompt of a batch; return the state that `decode_step` continues from."""
        raise self._not_generating()

    def decode_step(self, state: Any, tokens: Tokens) -> Logits:
        """Run one token per row (int64 [R]), update `state` in place, return float32 [R, V]."""
        raise self._not_generating()

    @property
    def reduces_logits(self) -> bool:
        """Return whether `decode_top` copies less from a GPU than `decode_step`."""
        return self.backend.reduces_logits

    def decode_top(self, state: Any, tokens: Tokens, count: int) -> TopLogits:
        """Run one token per row as `decode_step` does; return the `count` highest logits of each row.

        Only where `reduces_logits` is true.
        """
        raise self._not_generating()

    def generate_sequences(self, graph: str, batch: Batch, feeds: Feeds) -> Tokens:
        """Run a graph with the generation loop; return int64 [B, T], each row's prompt and new tokens.

        Args:
            graph: one of the backend's `generation_graphs`.
            batch: the prompts or source texts.
            feeds: search settings, see `smelt/generation/search.py`.
        """
        sequences: Tokens = self.backend.call(graph, {**batch.source, **feeds})["sequences"]
        return sequences

    def reorder_cache(self, state: Any, rows: Tokens) -> Any:
        """Return the state whose row i is the row rows[i] (int64 [R]) of `state`, which becomes invalid.

        Beam search repeats and drops beams with it; so R may differ from the previous number of rows.
        """
        raise self._not_generating()

    def close(self) -> None:
        """Free the memory and the runtime's threads."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
