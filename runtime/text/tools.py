"""What does not depend on the texts, made once for an opened artifact: tokenizer, limits, decoding."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.runtime.generate.decoding import Decoding, settle
from smelt.runtime.generate.settings import Generation
from smelt.runtime.text.limits import NO_LIMIT, length_limit
from smelt.runtime.text.open_tokenizer import open_tokenizer
from smelt.runtime.text.tokenizer import TextTokenizer

_KEPT = 64  # settings; a caller who makes up new ones for every call must not fill the memory


class TextTools:
    """Made when an artifact is opened, filled at first use, shared by all threads.

    folder: where the tokenizer's files lie. config, generation_config: the model's, as dicts; a runner may
    have corrected them. most: tokens of a text that the runtime takes, where that is less than the model.
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
        self._decodings: dict[Generation, Decoding] = {}

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer.

        Raises:
            InputError: its files are missing or do not fit together.
        """
        if self._tokenizer is None:
            with self._lock:
                if self._tokenizer is None:
                    self._tokenizer = open_tokenizer(self.folder)
        return self._tokenizer

    @property
    def limit(self) -> int:
        """The most tokens that a text may have."""
        return min(self._most, length_limit(self.tokenizer, self.config))

    def decoding(self, generation: Generation, runner: Any) -> Decoding:
        """Return `generation` with its gaps filled from the model of `runner`, whose tools these are.

        Raises:
            InputError: the generation config asks for something that smelt's loop does not do.
        """
        found = self._decodings.get(generation)
        if found is None:
            found = settle(generation, runner)
            if len(self._decodings) < _KEPT:  # a new dict, since another thread may be reading the old one
                self._decodings = {**self._decodings, generation: found}
        return found
