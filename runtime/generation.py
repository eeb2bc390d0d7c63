"""The one generation loop, shared by all runners and equal to Hugging Face `generate`.

What the model's generation config asks for (forbidden words, forced tokens, a minimum length) is
obeyed in the order in which transformers' logits processors apply it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from smelt.core.errors import InputError
from smelt.core.stage import Settings
from smelt.runtime.runner import Batch, Logits, Runner, Tokens

# Settings of a generation config that would change the words and that this loop does not have,
# with the value that means "off".
_UNSUPPORTED: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "do_sample": False,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "begin_suppress_tokens": None,
    "guidance_scale": None,
}


class Generation(Settings):
    """How texts are generated. Only greedy search (`beams: 1`) exists so far."""

    beams: Literal[1] = 1
    max_new_tokens: int = Field(default=128, ge=1, le=4096)


def greedy(runner: Runner, batch: Batch, generation: Generation) -> list[list[int]]:
    """Decode `batch` greedily; return each row's new tokens, the end-of-sequence token included.

    Raises:
        InputError: the generation config asks for something that this loop does not do.
    """
    rules = _Rules(runner.generation_config, runner.config, generation.max_new_tokens)
    state = runner.encode(batch)
    rows = batch.input_ids.shape[0]
    tokens: Tokens = np.full(rows, rules.start, dtype=np.int64)
    produced = np.empty((rows, generation.max_new_tokens), dtype=np.int64)
    unfinished = np.ones(rows, dtype=bool)
    for step in range(generation.max_new_tokens):
        logits = runner.decode_step(state, tokens)
        rules.apply(logits, produced[:, :step])
        tokens = np.where(unfinished, logits.argmax(axis=-1), rules.pad)
        produced[:, step] = tokens
        unfinished &= ~np.isin(tokens, rules.eos)
        if not unfinished.any():
            break
    return [_until_eos(row[: step + 1].tolist(), set(rules.eos)) for row in produced]


def _until_eos(row: list[int], eos: set[int]) -> list[int]:
    for index, token in enumerate(row):
        if token in eos:
            return row[: index + 1]
    return row


class _Rules:
    """What the generation config says about which token may come when."""

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any], max_new_tokens: int) -> None:
        for name, off in _UNSUPPORTED.items():
            if settings.get(name, off) not in (off, None):
                raise InputError(
                    f"generation_config.json: {name} is {settings[name]!r}, which the greedy loop does not"
                    f" do; set it to {off!r}."
                )

        def get(name: str) -> Any:
            value = settings.get(name)
            return config.get(name) if value is None else value

        self.start = get("decoder_start_token_id")
        if self.start is None:
            raise InputError("config.json: no decoder_start_token_id, so there is no token to begin with.")
        eos = get("eos_token_id")
        self.eos: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
        pad = get("pad_token_id")
        self.pad: int = self.eos[0] if pad is None else pad
        words = settings.get("bad_words_ids") or []
        # as transformers does: a single end-of-sequence token cannot be a bad word
        words = [w for w in words if w not in [[e] for e in self.eos]]
        self.bad_tokens = [w[0] for w in words if len(w) == 1] + list(settings.get("suppress_tokens") or [])
        self.bad_sequences = [w for w in words if len(w) > 1]
        # min_length counts the start token, min_new_tokens does not
        self.min_new = max((settings.get("min_length") or 0) - 1, settings.get("min_new_tokens") or 0)
        # as transformers does: with a generation config of its own, the model's config is not asked
        forced = settings or config
        self.forced_bos = forced.get("forced_bos_token_id")
        self.forced_eos = forced.get("forced_eos_token_id")
        self.last = max_new_tokens - 1

    def apply(self, logits: Logits, produced: Tokens) -> None:
        """Change float32 `logits` [B, V] in place, given the tokens [B, step] produced so far."""
        step = produced.shape[1]
        logits[:, self.bad_tokens] = -np.inf
        for word in self.bad_sequences:
            head = word[:-1]
            if len(head) <= step:
                hit = (produced[:, step - len(head) :] == head).all(axis=1)
                logits[hit, word[-1]] = -np.inf
        if step < self.min_new:
            logits[:, self.eos] = -np.inf
        if step == 0 and self.forced_bos is not None:
            _force(logits, [self.forced_bos])
        if step == self.last and self.forced_eos is not None:
            _force(logits, self.forced_eos if isinstance(self.forced_eos, list) else [self.forced_eos])


def _force(logits: Logits, tokens: list[int]) -> None:
    logits[:] = -np.inf
    logits[:, tokens] = 0.0
