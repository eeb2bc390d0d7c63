"""How often intervals contain the true value, and tests reject without a difference, by metric and n.

    python benchmarks/interval_coverage.py [--samples 4000] [POPULATION ...]

Each population has 20,000 examples, scored for two models of equal quality: their outputs differ, and each
pair is swapped at random. Its own score is the true value, and the true difference is about 0. Samples of
n examples are drawn from it; a 95 % interval should contain the true value in 95 % of them, and a test
should reject in 5 % or fewer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from smelt.evaluate.significance import Statistics, compare_steps, metric_interval, metric_value

Rows = NDArray[np.float64]
POPULATION = 20_000
COUNTS = (6, 8, 12, 20, 50)


def _perplexity(draw: np.random.Generator) -> tuple[Rows, Rows]:
    """Windows of 256 tokens; the losses of quantized weights differ by 0.02 nats per token, a few by more."""
    tokens = np.full(POPULATION, 256.0)
    level = draw.normal(3.4, 0.35, POPULATION)
    other = level + draw.normal(0, 0.02, POPULATION) * np.exp(draw.normal(0, 0.5, POPULATION))
    return tuple(np.stack([tokens * nats, tokens, 4 * tokens], axis=1) for nats in (level, other))  # type: ignore[return-value]


def _response_perplexity(draw: np.random.Generator) -> tuple[Rows, Rows]:
    """Responses of 3 to 100 tokens, whose losses per token differ widely."""
    tokens = np.rint(np.exp(draw.normal(3, 0.6, POPULATION))) + 1
    level = draw.gamma(6, 0.25, POPULATION)
    other = level * np.exp(draw.normal(0, 0.1, POPULATION))
    return tuple(np.stack([tokens * nats, tokens, 4 * tokens], axis=1) for nats in (level, other))  # type: ignore[return-value]


def _means(values: Rows, change: Rows) -> tuple[Rows, Rows]:
    return values[:, None], np.clip(values + change, 0, 1)[:, None]


def _rouge(draw: np.random.Generator) -> tuple[Rows, Rows]:
    """ROUGE-L of summaries, of which 30 % are the same for both."""
    change = np.where(draw.random(POPULATION) < 0.7, draw.normal(0, 0.15, POPULATION), 0)
    return _means(draw.beta(2, 3, POPULATION), change)


def _high_rouge(draw: np.random.Generator) -> tuple[Rows, Rows]:
    """ROUGE-L near 100, with a few large losses."""
    noise = draw.normal(0, 0.1, POPULATION) * np.exp(draw.normal(0, 0.5, POPULATION))
    return _means(draw.beta(8, 1.5, POPULATION), np.where(draw.random(POPULATION) < 0.8, noise, 0))


def _cross_entropy(draw: np.random.Generator) -> tuple[Rows, Rows]:
    """Losses of a classifier: most are small, a few are large."""
    losses = draw.gamma(1, 0.5, POPULATION)
    return losses[:, None], (losses * np.exp(draw.normal(0, 0.2, POPULATION)))[:, None]


def _classes(draw: np.random.Generator) -> tuple[Rows, Rows]:
    """Three classes, 50, 30 and 20 %; 85 % are predicted rightly, a sixth of the predictions differ."""
    gold = draw.choice(3, p=[0.5, 0.3, 0.2], size=POPULATION)
    guesses = [np.where(draw.random(POPULATION) < 0.9, gold, draw.integers(0, 3, POPULATION)) for _ in "ab"]
    return tuple(np.stack([guess, gold], axis=1).astype(np.float64) for guess in guesses)  # type: ignore[return-value]


def _numbers(draw: np.random.Generator) -> tuple[Rows, Rows]:
    """Predicted numbers whose correlation with the gold ones is 0.82."""
    gold, error = draw.normal(0, 1, POPULATION), draw.normal(0, 0.7, POPULATION)
    other = 0.9 * error + np.sqrt(1 - 0.81) * draw.normal(0, 0.7, POPULATION)
    return np.stack([gold + error, gold], axis=1), np.stack([gold + other, gold], axis=1)


def _texts(metric: str) -> Callable[[np.random.Generator], tuple[Rows, Rows]]:
    def draw_rows(draw: np.random.Generator) -> tuple[Rows, Rows]:
        """Sentences of 5 to 24 words, of which a share is replaced or missing, by sentence."""
        from smelt.evaluate.quality import score_texts

        words = [start + end for start in "bdfgklmnprst" for end in ("a", "eri", "oun", "imal", "us")]
        frequency = 1 / np.arange(1, len(words) + 1)
        frequency /= frequency.sum()
        texts = [draw.choice(words, p=frequency, size=draw.integers(5, 25)) for _ in range(2000)]

        def rows() -> Rows:
            outputs = []
            for text in texts:
                share = 0.3 * np.exp(draw.normal(0, 0.6))
                drawn = draw.choice(words, p=frequency, size=len(text))
                changed = np.where(draw.random(len(text)) < share, drawn, text)
                outputs.append(" ".join(changed[draw.random(len(text)) > 0.05]))
            score = score_texts([metric], outputs, [[" ".join(text)] for text in texts])[metric]
            return np.asarray(score.statistics.rows, dtype=np.float64)

        return rows(), rows()

    return draw_rows


POPULATIONS: dict[str, tuple[str, Callable[[np.random.Generator], tuple[Rows, Rows]]]] = {
    "perplexity": ("perplexity", _perplexity),
    "response_perplexity": ("response_perplexity", _response_perplexity),
    "rougeL": ("rougeL", _rouge),
    "rougeL near 100": ("rougeL", _high_rouge),
    "bleu": ("bleu", _texts("bleu")),
    "chrf": ("chrf", _texts("chrf")),
    "cross_entropy": ("cross_entropy", _cross_entropy),
    "f1": ("f1", _classes),
    "matthews": ("matthews", _classes),
    "pearson": ("pearson", _numbers),
    "spearman": ("spearman", _numbers),
}


def simulate(population: str, n: int, samples: int, seed: int = 0) -> tuple[float, float, float] | None:
    """Return the shares of samples of `n` examples whose intervals contain the truth, and that are rejected.

    Returns:
        The coverage of the score's interval, that of the difference's, and the share of tests with p < 0.05;
        None where intervals of so few examples are not given.
    """
    metric, make = POPULATIONS[population]
    draw = np.random.default_rng(seed)
    ours, theirs = make(draw)
    swapped = draw.random(len(ours)) < 0.5
    pair = [np.where(swapped[:, None], *sides) for sides in ((ours, theirs), (theirs, ours))]

    def statistics(rows: Rows) -> Statistics:
        return Statistics(metric=metric, signature="s", examples="e", rows=rows.tolist())

    truth, other = (metric_value(statistics(rows)) for rows in pair)
    covered, held, rejected = 0, 0, 0
    for _ in range(samples):
        drawn = draw.integers(0, len(ours), n)
        step, baseline = (statistics(rows[drawn]) for rows in pair)
        interval, compared = metric_interval(step), compare_steps(step, baseline)
        ends = compared["ci95"]
        if interval is None or ends is None:
            return None
        covered += interval[0] <= truth <= interval[1]
        held += ends[0] <= truth - other <= ends[1]
        rejected += compared["p_value"] < 0.05
    return covered / samples, held / samples, rejected / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("populations", nargs="*", default=list(POPULATIONS))
    options = parser.parse_args()
    print("| population | n | score's interval | difference's interval | p < 0.05 |\n|---|---|---|---|---|")
    for population in options.populations:
        for n in COUNTS:
            shares = simulate(population, n, options.samples)
            cells = ["not judged"] * 3 if shares is None else [f"{100 * share:.1f} %" for share in shares]
            print(f"| {population} | {n} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
