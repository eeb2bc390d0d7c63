"""How many tokens a model takes: its table of positions, and what its tokenizer says.

Only a table that is there limits a text: a family whose attention counts distances has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smelt.families.family import Positions
from smelt.families.registry import find_family

NO_LIMIT = 10**9


def position_table(config: Mapping[str, Any]) -> int | None:
    """Return how many rows the table of positions has; None where there is no table."""
    word = _positions(config).table
    rows = None if word is None else config.get(word)
    return rows if isinstance(rows, int) and rows > 0 else None


def position_offset(config: Mapping[str, Any]) -> int:
    """Return how many rows of the position table no token uses."""
    return int(config.get("pad_token_id") or 0) + 1 if _positions(config).after_pad else 0


def _positions(config: Mapping[str, Any]) -> Positions:
    family = find_family(config)
    return Positions() if family is None else family.positions


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens the position table has room for; None where the model has none."""
    rows = position_table(config)
    return None if rows is None else rows - position_offset(config)


def lower_position_limit(config: dict[str, Any], most: int) -> None:
    """Let `config` say, in its family's own word, that a text has no more than `most` tokens."""
    word = _positions(config).table
    if word is not None:
        config[word] = min(position_limit(config) or most, most) + position_offset(config)


def length_limit(tokenizer: Any, config: Mapping[str, Any]) -> int:
    """Return the most tokens that tokenizer and position table both allow."""
    return int(min(tokenizer.model_max_length, position_limit(config) or NO_LIMIT))
