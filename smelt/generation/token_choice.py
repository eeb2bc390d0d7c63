"""Choose tokens from the highest logits of each row, so that all others stay on the GPU.

Shapes: R = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.generation.backend import Logits, Tokens
from smelt.generation.logits_processors import LogitsProcessors
from smelt.generation.runner import Runner


def reducible_bans(runner: Runner, rules: LogitsProcessors, length: int) -> tuple[int, ...] | None:
    """Return the banned tokens of a step whose highest logits suffice, so that all others stay on the GPU.

    None where they do not suffice, or are in this memory anyway.
    """
    return rules.bans_at_length(length) if runner.reduces_logits else None


@dataclass(frozen=True)
class TokenChoice:
    """How a token is chosen from each row of scores [R, V], changed in place; returns int64 [R].

    highest: the number of highest scores that suffice (of equal ones at its end, some may be missing); 0 if
    all are needed.
    """

    choose: Callable[[Logits], Tokens]
    highest: int

    def next_tokens(self, runner: Runner, state: Any, tokens: Tokens, bans: tuple[int, ...]) -> Tokens:
        """Run a step and return the next token of each row, chosen from the highest logits."""
        top = runner.decode_top(state, tokens, self.highest + len(bans))
        order = np.argsort(top.tokens, axis=1)  # as in a row of all scores, so that the same ones are chosen
        candidates = np.take_along_axis(top.tokens, order, axis=1)
        scores = np.take_along_axis(top.values, order, axis=1)
        scores[np.isin(candidates, bans)] = -np.inf
        return np.take_along_axis(candidates, self.choose(scores)[:, None], axis=1)[:, 0]
