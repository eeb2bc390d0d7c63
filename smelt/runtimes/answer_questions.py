"""Answers to questions about texts, for every runner of a model that marks spans.

The answer is the best span of all windows of its context, as `postprocess_qa_predictions` of transformers'
example run_qa (utils_qa.py) finds it.

Shapes: B = batch, L = tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from smelt.core.errors import InputError
from smelt.core.messages import CONTROL_ESCAPES
from smelt.core.process_group import map_batches, merge_shares, process_count
from smelt.data.splits import Example
from smelt.generation.backend import check_finite_outputs
from smelt.generation.prompt_batches import OnTruncate
from smelt.generation.runner import Runner
from smelt.models.context_windows import ContextWindow, encode_contexts
from smelt.models.tokenizer import EncodedTexts
from smelt.runtimes.predict_texts import length_sorted_batches
from smelt.stage import Progress, no_progress

N_BEST = 20
MAX_ANSWER_TOKENS = 30


class Answer(NamedTuple):
    """An answer, with the names of transformers' pipeline.

    answer: context[start:end]; "" if the question is unanswerable. score: its probability among the best
    spans, 0 to 1. start, end: its characters, end exclusive; both 0 if it is empty.
    """

    answer: str
    score: float
    start: int
    end: int


class _Span(NamedTuple):
    """score: sum of the logits of start and end. start, end: characters; both 0 of no answer."""

    score: float
    start: int
    end: int


def answer_questions(
    runner: Runner,
    examples: Sequence[Example],
    batch_size: int = 32,
    progress: Progress = no_progress,
    on_truncate: OnTruncate | None = None,
    *,
    may_be_unanswerable: bool = True,
) -> list[Answer]:
    """Return the answer to each question.

    Args:
        runner: of a model that marks spans.
        examples: questions with contexts.
        batch_size: windows per batch.
        progress: called for each batch.
        on_truncate: called with the number of questions that were truncated, and the model's limit.
        may_be_unanswerable: whether no answer, the first token of every window, competes with the spans, as
            in SQuAD 2.0.

    Raises:
        InputError: no questions, or one without context (`missing-context`).
        RunError: `non-finite-outputs`.
    """
    if not examples:
        raise InputError("No questions were given.", code="empty-data")
    windows, truncated = example_windows(runner, examples)
    if truncated and on_truncate is not None:
        on_truncate(truncated, runner.text.max_input_length)
    token_rows = EncodedTexts([w.ids for w in windows], [w.types or [] for w in windows], truncated)
    results: dict[int, NDArray[np.float32]] = {}
    pad = runner.text.tokenizer.pad_token_id or 0
    batches = length_sorted_batches(token_rows, batch_size, pad)
    for (indices, _), outputs in map_batches(
        lambda _, item: runner.forward(item[1]), batches, runner.workers
    ):
        for i, logits in zip(indices, outputs, strict=True):
            results[i] = check_finite_outputs(logits[: len(windows[i].ids)])
        progress(min(len(windows), len(results) * process_count()), len(windows), "windows")
    grouped: list[list[tuple[ContextWindow, NDArray[np.float32]]]] = [[] for _ in examples]
    for window, logits in zip(windows, merge_shares(results), strict=True):
        grouped[window.example].append((window, logits))
    return [
        best_answer(str(example.text_pair), parts, may_be_unanswerable)
        for example, parts in zip(examples, grouped, strict=True)
    ]


def example_windows(runner: Runner, examples: Sequence[Example]) -> tuple[list[ContextWindow], int]:
    """Return the windows of all questions, and the number of truncated questions.

    Raises:
        InputError: `missing-context`.
    """
    for number, example in enumerate(examples, 1):
        if example.text_pair is None:
            raise InputError(
                f"question {number}, {example.text[:60]!r}, has no context. Pass both: in Python a tuple"
                " (QUESTION, CONTEXT), on the command line with a tab between them.",
                code="missing-context",
            )
    tools = runner.text
    questions, contexts = [e.text for e in examples], [str(e.text_pair) for e in examples]
    return encode_contexts(tools.tokenizer, questions, contexts, tools.max_input_length)


def best_answer(
    context: str, parts: Sequence[tuple[ContextWindow, NDArray[np.float32]]], may_be_unanswerable: bool
) -> Answer:
    """Return the best answer of all windows of a context.

    Args:
        context: the text.
        parts: each window with its logits, float32 [L, 2].
        may_be_unanswerable: whether there may be no answer.
    """
    spans = [span for window, logits in parts for span in _candidates(window, logits)]
    no_answer = _Span(min(float(logits[0].astype(np.float64).sum()) for _, logits in parts), 0, 0)
    if may_be_unanswerable:
        spans.append(no_answer)
    best = sorted(spans, key=lambda span: -span.score)[:N_BEST]
    if may_be_unanswerable and no_answer not in best:
        best.append(no_answer)
    if not best:
        return Answer("", 0.0, 0, 0)
    probabilities = softmax([span.score for span in best])
    index = next((i for i, span in enumerate(best) if context[span.start : span.end].strip()), None)
    if index is None or (may_be_unanswerable and no_answer.score > best[index].score):
        empty = best.index(no_answer) if may_be_unanswerable else 0
        return Answer("", float(probabilities[empty]), 0, 0)
    text = context[best[index].start : best[index].end]
    # tokens of some tokenizers begin with the space before a word
    start = best[index].start + len(text) - len(text.lstrip())
    end = best[index].end - (len(text) - len(text.rstrip()))
    return Answer(context[start:end], float(probabilities[index]), start, end)


def _candidates(window: ContextWindow, logits: NDArray[np.float32]) -> list[_Span]:
    """Return the spans of the `N_BEST` best starts and ends; logits: float32 [L, 2]."""
    values = logits.astype(np.float64)
    best_starts, best_ends = (np.argsort(values[:, side])[: -N_BEST - 1 : -1] for side in (0, 1))
    starts, ends = (grid.ravel() for grid in np.meshgrid(best_starts, best_ends, indexing="ij"))
    is_context = np.array([span is not None for span in window.offsets])
    is_span = is_context[starts] & is_context[ends] & (starts <= ends) & (ends - starts < MAX_ANSWER_TOKENS)
    spans = []
    for first, last in zip(starts[is_span].tolist(), ends[is_span].tolist(), strict=True):
        first_span, last_span = window.offsets[first], window.offsets[last]
        assert first_span is not None
        assert last_span is not None
        spans.append(_Span(float(values[first, 0] + values[last, 1]), first_span[0], last_span[1]))
    return spans


def answer_text(answer: Answer) -> str:
    """Return an answer as `smelt predict` prints it: `in London [10:19 0.998]`; empty: `[0.998]`."""
    if not answer.answer:
        return f"[{answer.score:.3f}]"
    text = answer.answer.translate(CONTROL_ESCAPES)
    return f"{text} [{answer.start}:{answer.end} {answer.score:.3f}]"
