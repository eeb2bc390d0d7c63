"""Tools that do not depend on the texts, created once per opened artifact: tokenizer, limits, decoding."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.generation.config import GenerationConfig, GenerationSettings, resolve_generation
from smelt.models.length_limits import NO_LIMIT, max_input_length
from smelt.models.open_tokenizer import open_tokenizer
from smelt.models.tokenizer import TextTokenizer

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
        found = self._decodings.get(generation)
        if found is None:
            found = resolve_generation(generation, runner)
            if (
                len(self._decodings) < _MAX_CACHED
            ):  # a new dict, since another thread may be reading the old one
                self._decodings = {**self._decodings, generation: found}
        return found
