"""How far the next-token distributions of a step are from its baseline's: KL divergence.

The baseline writes the outputs of some samples. Every model then gets these outputs as its own (teacher
forcing), so that both predict the next token after the same tokens. It needs no references, and unlike a
comparison of texts it does not grow once one token differs. One model is in memory at a time, with the
baseline's logits.

Shapes: B = batch, T = tokens of the longest output, N = rows of logits, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from smelt.generation.backend import Batch, Logits, Tokens
from smelt.generation.config import GenerationConfig, GenerationSettings, vocabulary_sizes
from smelt.generation.runner import Runner
from smelt.generation.search import forced_logits
from smelt.runtimes.predict_texts import generation_batches

# The baseline's logits in memory; of longer outputs only the first tokens are compared.
_MAX_LOGITS_BYTES = 512 * 2**20


@dataclass(frozen=True)
class _Outputs:
    """Outputs of the baseline. batch: their sources. tokens: int64 [B, T]. is_compared: bool [B, T].

    logits: of the baseline for the compared tokens at each position, float32 [up to B, V].
    """

    batch: Batch
    tokens: Tokens
    is_compared: Any
    logits: list[Logits]

    @property
    def count(self) -> int:
        """The number of compared tokens."""
        return sum(map(len, self.logits))


class _NotComparableError(Exception):
    """The tokens of two models cannot be compared; the text is the reason."""


def tokens_not_compared(reason: str) -> dict[str, Any]:
    """Return the fields of `agreement` of a step without a divergence."""
    return {"kl_divergence": None, "kl_n": None, "kl_tokens": None, "kl_reason": reason}


class TokenComparison:
    """Compares the next-token distributions of steps with those of one baseline.

    baseline: an open runner of a generating model; it may be closed afterwards. texts: the sources or
    prompts. generation: how the baseline writes. batch_size: sources per call.
    """

    def __init__(
        self, baseline: Runner, texts: Sequence[str], generation: GenerationSettings, batch_size: int
    ) -> None:
        self.texts, self.generation, self.batch_size = texts, generation, batch_size
        self.decoding = baseline.text.resolved_generation(generation, baseline)
        vocabulary = vocabulary_sizes(baseline.config)[1]
        longest = max(1, _MAX_LOGITS_BYTES // (4 * vocabulary * len(texts)))
        self._outputs = []
        for part, (_, batch) in enumerate(self._batches(baseline, self.decoding)):
            rows = baseline.generator(baseline, batch, self.decoding, part)
            tokens = np.full((len(rows), max(1, *map(len, rows))), self.decoding.pad, dtype=np.int64)
            for row, new in zip(tokens, rows, strict=True):
                row[: len(new)] = new
            # a forced first token is not a prediction
            first = int(self.decoding.forced_bos_token_id is not None and self.decoding.start is not None)
            places, counts = np.arange(tokens.shape[1]), np.array([min(len(new), longest) for new in rows])
            is_compared = (places >= first) & (places < counts[:, None])
            logits = list(_compared_logits(baseline, batch, self.decoding, tokens, is_compared))
            self._outputs.append(_Outputs(batch, tokens, is_compared, logits))
        self._texts = [baseline.text.tokenizer.decode_batch(each.tokens.tolist()) for each in self._outputs]

    def _batches(self, runner: Runner, decoding: GenerationConfig) -> Sequence[tuple[list[int], Batch]]:
        return generation_batches(runner, self.texts, decoding, self.batch_size)

    def compare(self, step: Runner) -> dict[str, Any]:
        """Return the mean divergence KL(baseline || step), nats per token, as fields of `agreement`.

        Where the two cannot be compared `kl_reason` says why.
        """
        try:
            total = self._total_divergence(step)
        except _NotComparableError as error:
            return tokens_not_compared(str(error))
        count = sum(each.count for each in self._outputs)
        return {
            "kl_divergence": max(0.0, total / count),  # rounding errors may be negative
            "kl_n": sum(len(each.tokens) for each in self._outputs),
            "kl_tokens": count,
            "kl_reason": None,
        }

    def _total_divergence(self, step: Runner) -> float:
        """Return the sum over all compared tokens, nats.

        Raises:
            _NotComparableError: other tokens, or outputs without a finite divergence.
        """
        if not any(each.count for each in self._outputs):
            raise _NotComparableError("the baseline writes no tokens")
        batches = [batch for _, batch in self._batches(step, self.decoding)]
        total = 0.0
        for each, texts, step_batch in zip(self._outputs, self._texts, batches, strict=True):
            if not np.array_equal(each.batch.input_ids, step_batch.input_ids):
                raise _NotComparableError("its tokenizer gives other tokens for the samples")
            if step.text.tokenizer.decode_batch(each.tokens.tolist()) != texts:
                raise _NotComparableError("its tokenizer has other tokens")
            step_logits = _compared_logits(step, step_batch, self.decoding, each.tokens, each.is_compared)
            for logits, expected in zip(step_logits, each.logits, strict=True):
                if logits.shape != expected.shape:
                    raise _NotComparableError("its vocabulary has another size")
                total += summed_divergence(logits, expected)
        if np.isposinf(total):
            raise _NotComparableError(
                "it excludes tokens to which the baseline gives a probability, as a shortlist does; the"
                " divergence is infinite"
            )
        if not np.isfinite(total):
            raise _NotComparableError("its outputs are not finite")
        return total


def _compared_logits(
    runner: Runner, batch: Batch, decoding: GenerationConfig, tokens: Tokens, is_compared: Any
) -> Iterator[Logits]:
    """Yield the logits of the compared tokens at each position, float32 [up to B, V]."""
    last = int(np.flatnonzero(is_compared.any(axis=0)).max(initial=0))
    for position, logits in enumerate(forced_logits(runner, batch, decoding, tokens[:, : last + 1])):
        yield logits[is_compared[:, position]]


def summed_divergence(logits: Logits, expected: Logits) -> float:
    """Return the sum of KL(expected || logits) over rows, nats; infinite where only `logits` exclude a token.

    Args:
        logits: of the step, float32 [N, V].
        expected: of the baseline, likewise.
    """
    total = 0.0
    for step_logits, base in zip(
        torch.from_numpy(logits).split(64), torch.from_numpy(expected).split(64), strict=True
    ):
        p, q = base.double().log_softmax(dim=-1), step_logits.double().log_softmax(dim=-1)
        terms = p.exp() * (p - q)
        total += float(terms.masked_fill(p.isneginf(), 0.0).sum())  # 0 log 0 = 0
    return total
