"""Score the probability of masked tokens of running text."""

from __future__ import annotations

from typing import Any

from smelt.data.splits import Split
from smelt.pipeline.execute.scores.base_scorer import BaseScorer, split_scores
from smelt.stage import Progress


def score_split(scorer: BaseScorer, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
    """Return the score of masked tokens, as `Scorer.score`."""
    from smelt.evaluate.quality import score_masked_windows
    from smelt.models.checkpoint import load_tokenizer
    from smelt.models.masked_windows import (
        MASKED_FRACTION,
        TokenMasker,
        cut_bidirectional_windows,
        fixed_masks,
    )
    from smelt.models.text_rules import join_texts, window_length
    from smelt.runtimes.fill_mask import score_masked_tokens

    tokenizer, limit = load_tokenizer(runner.folder), runner.text.max_input_length
    windows = cut_bidirectional_windows(split, tokenizer, limit)
    masked = fixed_masks(windows, TokenMasker(tokenizer))
    results = score_masked_tokens(runner, masked, scorer.batch_size, progress)
    signature = f"window:{window_length(split.windows, limit)}|masked:{MASKED_FRACTION}|seed:0"
    vocab_size = runner.config.get("vocab_size")
    return split_scores(
        score_masked_windows(scorer.metrics, *results, signature, join_texts(split), vocab_size)
    )
