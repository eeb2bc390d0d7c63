"""Score generated texts, and the likelihood of given ones: references, and choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smelt.core.messages import Message, warning
from smelt.data.splits import Split
from smelt.evaluate.metrics.metric import ChoiceSamples, ResponseSamples
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC, TEXT_METRICS, is_custom_metric, metrics_of
from smelt.models.text_rules import read_text_rules
from smelt.pipeline.execute.scores.base_scorer import BaseScorer, split_scores
from smelt.stage import Progress

if TYPE_CHECKING:
    from smelt.evaluate.quality import MetricScore

# Fraction of truncated outputs from which a warning is added.
TRUNCATED_OUTPUT_SHARE = 0.01


def score_split(scorer: BaseScorer, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
    """Return the score of generated and of given texts, as `Scorer.score`."""
    text_metrics = (*TEXT_METRICS, AGREEMENT_METRIC)
    generated = any(name in text_metrics or is_custom_metric(name) for name in scorer.metrics)
    value = _score_texts(scorer, runner, split, progress) if generated else None
    value = value or {"quality": {}, "statistics": {}, "predictions": []}
    scores: dict[str, MetricScore] = {}
    of_responses = [name for name in scorer.metrics if name in metrics_of(ResponseSamples)]
    if of_responses:
        scores |= (response_scores := score_given_responses(of_responses, runner, split, scorer.batch_size))
        if not response_scores:
            text = (
                f"{', '.join(of_responses)}: not scored, because the model excludes tokens of references,"
                " as a shortlist does: the loss is infinite."
            )
            value["warnings"] = [*value.get("warnings", ()), warning("infinite-loss", text)]
    of_choices = [name for name in scorer.metrics if name in metrics_of(ChoiceSamples)]
    if of_choices and split.has_choices:
        scores |= score_given_choices(of_choices, runner, split, scorer.batch_size, progress)
    for section, added in split_scores(scores).items():
        value[section] |= added
    for section in ("quality", "statistics"):  # in the recipe's order
        value[section] = {name: value[section][name] for name in scorer.metrics if name in value[section]}
    return value


def _score_texts(scorer: BaseScorer, runner: Any, split: Split, progress: Progress) -> dict[str, Any]:
    from smelt.evaluate.degenerate_outputs import count_degenerate
    from smelt.evaluate.quality import score_texts
    from smelt.generation.config import resolve_generation
    from smelt.runtimes.predict_texts import generate_texts

    texts = [e.text for e in split.examples]
    truncations: list[tuple[int, int]] = []
    predictions = generate_texts(
        runner,
        texts,
        scorer.generation,
        scorer.batch_size,
        progress,
        lambda *truncation: truncations.append(truncation),
    )
    references = [e.references for e in split.examples]
    language = read_text_rules(runner.folder).target_language
    metrics = [name for name in scorer.metrics if name in TEXT_METRICS]
    scores: dict[str, MetricScore] = {}
    if metrics:  # samples that only agreement is scored on have no references
        scores = score_texts(
            metrics,
            predictions,
            references,
            scorer.metric_settings,
            language,
            scorer.base,
            scorer.device,
        )
    sources = [example.text for example in split.examples]
    scores |= scorer.custom_scores(
        predictions, [list(references_of_text) for references_of_text in references], sources, split
    )
    scores |= scorer.agreement_score(runner, predictions, split, progress)
    value = {
        **split_scores({name: scores[name] for name in scorer.metrics if name in scores}),
        "predictions": predictions,
        "outputs": count_degenerate(
            predictions, references, sum(count for count, _ in truncations)
        ).model_dump(),
        "warnings": truncated_output_warnings(truncations, len(texts), scorer.generation.max_new_tokens),
    }
    for scored in value["quality"].values():
        scored["signature"] += f"|{resolve_generation(scorer.generation, runner).describe()}"
    return value


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


def truncated_output_warnings(
    truncated: Sequence[tuple[int, int]], texts: int, max_new_tokens: int | None
) -> list[Message]:
    """Return a warning about truncated outputs; none below 1 %, which hardly changes a score.

    Args:
        truncated: outputs that did not end, and their length in tokens, of each call.
        texts: number of all outputs.
        max_new_tokens: the setting; the model's limit may be lower.
    """
    cut = sum(count for count, _ in truncated)
    if cut < max(1, TRUNCATED_OUTPUT_SHARE * texts):
        return []
    longest = max(tokens for _, tokens in truncated)
    remedy = "Increase max_new_tokens."
    setting: str | None = "score.generation.max_new_tokens"
    if max_new_tokens is not None and longest < max_new_tokens:
        remedy, setting = "The model has no positions for more: use shorter samples.", None
    return [
        warning(
            "outputs-not-ended",
            f"{cut:,} of {texts:,} outputs ({100 * cut / texts:.1f} %) did not end within {longest} tokens"
            f" and were truncated. {remedy}",
            setting=setting,
        )
    ]
