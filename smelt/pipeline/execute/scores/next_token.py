"""Score the probability of each next token of running text."""

from __future__ import annotations

from typing import Any

from smelt.data.splits import Split
from smelt.pipeline.execute.scores.base_scorer import BaseScorer, split_scores
from smelt.stage import Progress


def score_split(scorer: BaseScorer, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
    """Return the score of next tokens, as `Scorer.score`."""
    from smelt.evaluate.quality import score_windows
    from smelt.generation.generating_runners import window_nll
    from smelt.models.checkpoint import load_tokenizer
    from smelt.models.text_rules import cut_windows, join_texts, max_input_length

    tokenizer = load_tokenizer(runner.folder)
    text = cut_windows(split, tokenizer, max_input_length(tokenizer, runner.config))
    losses = window_nll(runner, text, scorer.batch_size, progress)
    joined_text = join_texts(split)  # a trimmed vocabulary tokenizes the same text differently
    vocab_size = runner.config.get("vocab_size")
    scores = score_windows(
        scorer.metrics,
        losses,
        text.scored_tokens,
        text.scored_bytes,
        text.signature,
        joined_text,
        vocab_size,
    )
    return split_scores(scores)
