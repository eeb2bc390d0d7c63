"""The maximum number of tokens of a model: its position table, and its tokenizer's setting.

Only an existing table limits a text: a family with relative positions has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smelt.models.families.family import PositionEncoding
from smelt.models.families.registry import find_family

NO_LIMIT = 10**9


def position_table_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of rows of the position table; None without a table."""
    word = _family_positions(config).max_positions_key
    rows = None if word is None else config.get(word)
    return rows if isinstance(rows, int) and rows > 0 else None


def position_offset(config: Mapping[str, Any]) -> int:
    """Return the number of rows of the position table that no token uses."""
    return int(config.get("pad_token_id") or 0) + 1 if _family_positions(config).offset_by_pad_id else 0


def _family_positions(config: Mapping[str, Any]) -> PositionEncoding:
    family = find_family(config)
    return PositionEncoding() if family is None else family.position_encoding


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of the position table; None where the model has none."""
    rows = position_table_size(config)
    return None if rows is None else rows - position_offset(config)


def lower_position_limit(config: dict[str, Any], max_positions: int) -> None:
    """Set the maximum number of tokens of a text in `config`, under its family's key, to `max_positions`."""
    word = _family_positions(config).max_positions_key
    if word is not None:
        config[word] = min(position_limit(config) or max_positions, max_positions) + position_offset(config)


def max_input_length(tokenizer: Any, config: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens that tokenizer and position table both allow."""
    return int(min(tokenizer.model_max_length, position_limit(config) or NO_LIMIT))
