"""Score answers to questions."""

from __future__ import annotations

from typing import Any

from smelt.data.splits import Split
from smelt.evaluate.metrics.registry import is_custom_metric
from smelt.models.context_windows import MAX_LENGTH, STRIDE
from smelt.pipeline.execute.scores.base_scorer import BaseScorer, split_scores
from smelt.stage import Progress


def score_split(scorer: BaseScorer, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
    """Return the score of answers, as `Scorer.score`; an answer may be empty, as that of a deployed model."""
    from smelt.evaluate.quality import score_texts
    from smelt.runtimes.answer_questions import MAX_ANSWER_TOKENS, N_BEST, answer_questions

    answers = answer_questions(runner, split.examples, scorer.batch_size, progress)
    predicted = [answer.answer for answer in answers]
    references = [list(example.references) or [""] for example in split.examples]
    metrics = [name for name in scorer.metrics if not is_custom_metric(name)]
    scores = score_texts(metrics, predicted, references)
    sources = [[example.text, example.text_pair] for example in split.examples]
    scores |= scorer.custom_scores(predicted, references, sources, split)
    value = {
        **split_scores({name: scores[name] for name in scorer.metrics if name in scores}),
        "predictions": predicted,
    }
    for scored in value["quality"].values():
        scored["signature"] += f"|window:{MAX_LENGTH}/{STRIDE}|n-best:{N_BEST}|max:{MAX_ANSWER_TOKENS}"
    return value
