"""A vocabulary that can be trimmed, whatever files it lies in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Words:
    """The tokens of a tokenizer.

    kind: how it cuts, for messages. ids: of every token, added ones too. stay: ids that never go. parts: from
    an id the ids that stay with it. write: from the folder and the new number of each id that stays, the
    tokenizer's files; those that it replaces are removed.
    """

    kind: str
    ids: Mapping[str, int]
    stay: frozenset[int]
    parts: Callable[[int], frozenset[int]]
    write: Callable[[Path, Mapping[int, int]], None]
