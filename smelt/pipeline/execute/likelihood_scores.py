"""Scores by the likelihood of given texts: reference responses or targets, and choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smelt.data.splits import Split
from smelt.stage import Progress

if TYPE_CHECKING:
    from smelt.evaluate.quality import MetricScore


def score_given_responses(
    metrics: Sequence[str], runner: Any, split: Split, batch_size: int
) -> dict[str, MetricScore]:
    """Return the scores of the first reference of each example, given its prompt or source.

    Empty where the loss is infinite.
    """
    from smelt.evaluate.quality import score_responses
    from smelt.generation.generating_runners import is_causal, last_tokens_nll
    from smelt.generation.prompt_batches import encode_responses, fit_response
    from smelt.runtimes.predict_texts import target_nll

    tools = runner.text
    pairs = [(example.text, example.references[0]) for example in split.examples]
    sizes = [len(reference.encode()) for _, reference in pairs]
    vocabulary = runner.config.get("vocab_size")
    if not is_causal(runner.config):
        targets = _target_ids(runner, [reference for _, reference in pairs])
        losses = target_nll(runner, [text for text, _ in pairs], targets, batch_size)
        if math.inf in losses:
            return {}
        return score_responses(metrics, losses, list(map(len, targets)), sizes, pairs, vocabulary)
    encoded = [response for (response,) in encode_responses(pairs, tools.tokenizer, every_turn=False)]
    fitted = [
        fit_response(response, tools.max_input_length, tools.tokenizer.bos_token_id) for response in encoded
    ]
    tokens = [response.num_last_targets for response in fitted]
    losses = last_tokens_nll(runner, [response.ids for response in fitted], tokens, batch_size)
    return score_responses(metrics, losses, tokens, sizes, pairs, vocabulary)


def _target_ids(runner: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of target texts, with the special tokens that the model is trained with."""
    from smelt.models.checkpoint import load_tokenizer
    from smelt.models.text_rules import max_input_length
    from smelt.tasks.samples import encode_targets

    tokenizer = load_tokenizer(runner.folder)
    return encode_targets(texts, tokenizer, max_input_length(tokenizer, runner.config))[0]


def score_given_choices(
    metrics: Sequence[str], runner: Any, split: Split, batch_size: int, progress: Progress
) -> dict[str, MetricScore]:
    """Return the scores of the choices of each example, by their likelihood after the prompt."""
    from smelt.evaluate.quality import score_choices
    from smelt.generation.generating_runners import last_tokens_nll
    from smelt.generation.prompt_batches import encode_responses, fit_response

    tools = runner.text
    pairs = [(example.text, choice) for example in split.examples for choice in example.choices]
    encoded = encode_responses(pairs, tools.tokenizer, every_turn=False, with_end=False)
    fitted = [
        fit_response(response, tools.max_input_length, tools.tokenizer.bos_token_id)
        for (response,) in encoded
    ]
    choice_losses = iter(
        last_tokens_nll(
            runner,
            [response.ids for response in fitted],
            [response.num_last_targets for response in fitted],
            batch_size,
            progress,
        )
    )
    choices = [example.choices for example in split.examples]
    answers = [example.answer or 0 for example in split.examples]
    losses = [[next(choice_losses) for _ in texts] for texts in choices]
    examples = [[e.text, list(e.choices), e.answer] for e in split.examples]
    return score_choices(metrics, losses, choices, answers, examples)
