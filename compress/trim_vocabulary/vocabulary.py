"""A vocabulary that can be trimmed, independent of its file format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrimmableVocabulary:
    """The tokens of a tokenizer.

    kind: tokenizer type, for messages. ids: of every token, added ones too. required: ids that are always
    kept. dependencies: from an id to the ids that must be kept with it. write: from the folder and the new id
    of each kept id, writes the tokenizer's files and removes those that they replace.
    """

    kind: str
    ids: Mapping[str, int]
    required: frozenset[int]
    dependencies: Callable[[int], frozenset[int]]
    write: Callable[[Path, Mapping[int, int]], None]
