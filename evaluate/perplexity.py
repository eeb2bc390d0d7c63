"""Perplexity and bits per byte of running text, from the losses of its windows.

perplexity = exp(sum of losses / tokens); bits per byte = sum of losses / ln 2 / bytes of UTF-8. The
second does not depend on the tokenizer, so it compares models of different vocabularies.
For both lower is better. Intervals and tests resample whole windows (see significance.py), because the
tokens of one window depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import json_hash
from smelt.evaluate.metrics import METRICS, WINDOW_METRICS
from smelt.evaluate.quality import MetricScore
from smelt.evaluate.significance import (
    BOOTSTRAP_SEED,
    RESAMPLES,
    Statistics,
    bootstrap_interval,
    metric_value,
)


def score_windows(
    metrics: Sequence[str],
    losses: Sequence[float],
    tokens: Sequence[int],
    sizes: Sequence[int],
    windows: str,
    examples: object,
    vocabulary: int | None = None,
) -> dict[str, MetricScore]:
    """Score a text that was predicted window by window.

    Args:
        metrics: names from WINDOW_METRICS; the result has their order.
        losses: the sum of the negative log-likelihoods of each window's tokens, nats.
        tokens: how many tokens each window predicts.
        sizes: UTF-8 bytes of these tokens.
        windows: how the text was cut, for the signature.
        examples: the predicted tokens (JSON-able); only scores on equal examples can be compared in pairs.
        vocabulary: number of tokens; it equals the perplexity of a uniform model.

    Raises:
        InputError: an unknown metric, no windows, or lengths that differ.
    """
    for metric in metrics:
        if metric not in WINDOW_METRICS:
            known = ", ".join(WINDOW_METRICS)
            raise InputError(
                f"Unknown metric '{metric}' for perplexity; known:"
                f" {known}.{did_you_mean(metric, WINDOW_METRICS)}",
                code="unknown-metric",
            )
    if not losses or not len(losses) == len(tokens) == len(sizes):
        raise InputError(
            f"Perplexity needs one loss, token count and byte count per window; got {len(losses)},"
            f" {len(tokens)} and {len(sizes)}.",
            code="count-mismatch",
        )
    signature = f"{windows}|ci:bootstrap over windows|bs:{RESAMPLES}|seed:{BOOTSTRAP_SEED}"
    rows: list[list[int | float]] = [
        [float(loss), int(count), int(size)] for loss, count, size in zip(losses, tokens, sizes, strict=True)
    ]
    uniform: dict[str, float] = {}
    if vocabulary:
        bits = sum(tokens) * math.log2(vocabulary) / max(1, sum(sizes))
        uniform = {"perplexity": float(vocabulary), "bits_per_byte": bits}
    scores = {}
    for metric in metrics:
        statistics = Statistics(metric=metric, signature=signature, examples=json_hash(examples), rows=rows)
        scores[metric] = MetricScore(
            metric=metric,
            value=metric_value(statistics),
            unit=METRICS[metric].unit,
            higher_is_better=METRICS[metric].higher_is_better,
            n=sum(tokens),
            ci95=bootstrap_interval(statistics),
            signature=signature,
            chance=uniform.get(metric),
            statistics=statistics,
        )
    return scores
