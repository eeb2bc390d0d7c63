"""Compute the inputs of the generation graph that force or forbid tokens."""

from __future__ import annotations

from typing import Any

import numpy as np


def generation_inputs(settings: dict[str, Any], prompt: int, new: int) -> dict[str, Any]:
    """Return the inputs of the graph for `new` tokens: each step has a rule, which forces or forbids some."""
    short = (
        settings["min_length"] - prompt if settings["min_new_tokens"] is None else settings["min_new_tokens"]
    )
    first = int(prompt == 1 and bool(settings["forced_bos"]))  # the first step without a forced token
    rules = []
    for step in range(new):
        force = settings["forced_bos"] if step < first else []
        force = (settings["forced_eos"] if step == new - 1 else []) or force
        ban = settings["suppressed"] + (settings["suppressed_first"] if step == first else [])
        ban = ban if force else ban + settings["bad_words"] + (settings["eos"] if step < short else [])
        rules.append((tuple(force), tuple(ban)))
    table = list(dict.fromkeys(rules))
    biases = np.zeros((len(table), settings["vocabulary"]), dtype=np.float32)
    for bias, (force, ban) in zip(biases, table, strict=True):
        bias[:] = -np.inf if force else 0
        bias[list(force)], bias[list(ban)] = 0, -np.inf
        if force and settings["inputs"].get("renormalize_logits"):
            np.subtract(bias, np.log(np.exp(bias).sum()), out=bias)
    return {name: np.array(value) for name, value in settings["inputs"].items()} | {
        "repetition_penalty": np.array(settings["repetition_penalty"], dtype=np.float32),
        "max_new_tokens": np.array(new),
        "step_rules": np.array([table.index(rule) for rule in rules]),
        "rule_biases": biases,
        "forced_tokens": np.array([min({*force} - {*ban}, default=-1) for force, ban in table]),
    }


def new_tokens(row: Any, prompt: int, eos: list[int]) -> list[int]:
    """Return the tokens after the prompt of int64 [T], up to the end token."""
    new: list[int] = row[prompt:].tolist()
    return new[: next((index + 1 for index, token in enumerate(new) if token in eos), len(new))]
