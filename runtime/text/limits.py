"""How many tokens a model takes: its table of positions, and what its tokenizer says.

Only a table that is there limits a text. T5 has none: its attention counts distances, and the
`n_positions` of its configs is the length it was trained on, which transformers' modeling_t5.py never reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_LIMIT = 10**9
# Whose attention knows how far apart two tokens are, whatever their places.
_RELATIVE = frozenset({"t5", "mt5", "umt5", "longt5"})


def position_table(config: Mapping[str, Any]) -> int | None:
    """Return how many rows the table of positions has; None where there is no table."""
    if config.get("model_type") in _RELATIVE:
        return None
    rows = config.get("max_position_embeddings") or config.get("n_positions")  # GPT-2's word
    return rows if isinstance(rows, int) and rows > 0 else None


def position_offset(config: Mapping[str, Any]) -> int:
    """Return how many rows of the position table no token uses: RoBERTa counts from its pad id + 1.

    See `RobertaEmbeddings.create_position_ids_from_input_ids` in transformers; roberta-base has 514
    rows for 512 tokens.
    """
    return int(config.get("pad_token_id") or 0) + 1 if config.get("model_type") == "roberta" else 0


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens the position table has room for; None where the model has none."""
    rows = position_table(config)
    return None if rows is None else rows - position_offset(config)


def length_limit(tokenizer: Any, config: Mapping[str, Any]) -> int:
    """Return the most tokens that tokenizer and position table both allow."""
    return int(min(tokenizer.model_max_length, position_limit(config) or NO_LIMIT))
