"""Extractive question answering: the answer to a question is a span of a given text, its context.

The rows are those of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250), also of version 2.0 with unanswerable
questions (Rajpurkar et al. 2018, arXiv:1806.03822). Windows of long contexts, labels and answers are those of
transformers' example run_qa. Characters are those of Python's `str`, as in SQuAD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.data.examples import missing_column, nonempty_text, reject_surrogates, text_of_column
from smelt.data.splits import Columns, Example, Split
from smelt.models.context_windows import MAX_LENGTH, STRIDE
from smelt.tasks.spec import PackageClass, TaskSpec

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.generation.prompt_batches import OnTruncate
    from smelt.runtimes.answer_questions import Answer
    from smelt.tasks.samples import EncodedSample

HEAD_SUFFIX = "ForQuestionAnswering"
UNANSWERABLE_COLUMN = "is_impossible"  # of SQuAD 2.0


class QuestionAnswering(TaskSpec):
    """Extractive question answering."""

    name = "question-answering"
    column_roles = ("question", "context", "answers", "answer")
    optional_roles = ("answers", "answer")
    target_roles = ("answers", "answer")
    input_roles = ("question", "context")
    method = "predict"
    command_input = "$'QUESTION\\tCONTEXT'"
    service_input = '{"question": "QUESTION", "context": "CONTEXT"}'
    call = "question to answer"
    call_includes = "tokenizing is"
    postprocessing = "answers"
    sample_noun = "question"
    rate_unit = "questions/s"
    row_example = (
        '{"question": "...", "context": "...", "answers": {"text": ["..."], "answer_start": [0]}},'
        " or SQuAD's format"
    )
    main_metric = "token_f1"
    graph_output = "logits"
    package = PackageClass(
        "question_answering", "QuestionAnswerer", 'print(QuestionAnswerer()([("QUESTION", "CONTEXT")]))'
    )

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, as `TaskSpec.parse_row`."""
        question = nonempty_text(row, columns.question, location, "question")
        context = nonempty_text(row, columns.context, location, "context")
        if lacks_target:
            return Example(question, text_pair=context)
        pairs = _parse_answers(row, context, location, columns)
        texts, starts = tuple(text for text, _ in pairs), tuple(start for _, start in pairs)
        return Example(question, texts, context, label=starts)

    def required_roles(self, row: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the columns of question and context, and that of the answers which the row has."""
        return ("question", "context", "answer" if columns.answer in row else "answers")

    def label_examples(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Return an example for each output of the head, of start and end, if there are answers."""
        first = next((example for example in examples if example.label is not None), None)
        return () if first is None else tuple(replace(first, label=index) for index in (0, 1))

    def head_names(self, names: Sequence[str]) -> list[str]:
        """Return the names that transformers gives the two outputs."""
        return ["LABEL_0", "LABEL_1"]

    def package_settings(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return how contexts are divided and answers are chosen."""
        from smelt.runtimes.answer_questions import MAX_ANSWER_TOKENS, N_BEST

        return {
            "max_length": MAX_LENGTH,
            "stride": STRIDE,
            "n_best": N_BEST,
            "max_answer_tokens": MAX_ANSWER_TOKENS,
        }

    def placeholder_row(self, text: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with the context `text`, whose first word is the answer."""
        answers = {"text": text.split()[:1], "answer_start": [0]}
        return {"question": "Which?", "context": text, "answers": answers}

    def recognizes_row(self, row: Mapping[str, Any], columns: Columns, named: Columns) -> bool:
        """Return whether the row has a question, its context and answers."""
        has_texts = all(isinstance(row.get(name), str) for name in (columns.question, columns.context))
        return has_texts and (columns.answers in row or columns.answer in row)

    def recognizes_model(self, config: Mapping[str, Any], is_embedder: bool) -> bool:
        """Return whether the checkpoint has a head that marks spans."""
        return any(str(name).endswith(HEAD_SUFFIX) for name in config.get("architectures") or ())

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return the windows of all contexts with the tokens of the first answer, as `TaskSpec.encode`."""
        from smelt.models.context_windows import encode_contexts
        from smelt.models.tokenizer import as_text_tokenizer
        from smelt.tasks.span_samples import SpanSample, answer_tokens

        questions, contexts = _texts(split.examples)
        windows, truncated = encode_contexts(as_text_tokenizer(tokenizer), questions, contexts, limit)
        samples: list[EncodedSample] = []
        for window in windows:
            target, example = [0, 0], split.examples[window.example]
            if isinstance(example.label, tuple) and example.label:  # a sample for calibration may have none
                start = int(example.label[0])
                target = answer_tokens(window, start, start + len(example.references[0]))
            samples.append(SpanSample(window.ids, window.types, target))
        return samples, truncated

    def run(
        self,
        runner: Any,
        examples: Sequence[Example],
        generation: GenerationSettings,
        batch_size: int,
        on_truncate: OnTruncate | None = None,
    ) -> Sequence[Answer]:
        """Return the answer to each question, as `TaskSpec.run`."""
        from smelt.runtimes.answer_questions import answer_questions

        return answer_questions(runner, examples, batch_size, on_truncate=on_truncate)

    def result_line(self, result: Answer) -> str:
        """Return the answer as `text [start:end score]`; `[score]` if there is none."""
        from smelt.runtimes.answer_questions import answer_text

        return answer_text(result)

    def result_fields(self, result: Answer) -> dict[str, Any]:
        """Return the answer with the names of transformers' pipeline."""
        return result._asdict()

    def count_truncated(
        self, runner: Any, examples: Sequence[Example], generation: GenerationSettings
    ) -> int:
        """Return the number of questions of which the runner does not read all; contexts are divided."""
        from smelt.runtimes.answer_questions import example_windows

        return example_windows(runner, examples)[1]

    def too_long_samples(self, split: Split, tokenizer: Any, limit: int) -> set[int]:
        """Return the indices of questions that are truncated."""
        from smelt.models.context_windows import encode_contexts
        from smelt.models.tokenizer import as_text_tokenizer

        words = as_text_tokenizer(tokenizer)
        return {
            index
            for index, example in enumerate(split.examples)
            if encode_contexts(words, *_texts([example]), limit)[1]
        }


def _texts(examples: Sequence[Example]) -> tuple[list[str], list[str]]:
    """Return the questions and the contexts."""
    return [e.text for e in examples], [str(e.text_pair) for e in examples]


def _parse_answers(
    row: Mapping[str, Any], context: str, location: str, columns: Columns
) -> list[tuple[str, int]]:
    """Return text and start of each answer; none if the question is unanswerable.

    Raises:
        InputError: a column is missing or has another type, or an answer is not in the context.
    """
    name = f"question {row['id']!r}" if isinstance(row.get("id"), str) else "question"
    is_impossible = row.get(UNANSWERABLE_COLUMN)
    if is_impossible is True:
        column = columns.answers if row.get(columns.answers) else columns.answer
        value = row.get(column)
        if value and (not isinstance(value, Mapping) or value.get("text")):
            raise InputError(
                f"{location}: {name} has {UNANSWERABLE_COLUMN} true, but an answer in '{column}'. Remove the"
                f" answer, or set {UNANSWERABLE_COLUMN} to false.",
                code="needless-answer",
            )
        return []
    if columns.answers in row:
        column = columns.answers
        pairs = _answer_pairs(row[column], f"{location}: column '{column}': {name}")
    elif columns.answer in row:
        column = columns.answer
        pairs = _single_answer(text_of_column(row, column, location, "answer"), context, location, column)
    else:
        raise missing_column(row, columns.answers, location, "answers")
    if is_impossible is False and not pairs:
        raise InputError(
            f"{location}: {name} has {UNANSWERABLE_COLUMN} false, but no answer in '{column}'. Add one, or"
            f" set {UNANSWERABLE_COLUMN} to true.",
            code="missing-answer",
        )
    for text, start in pairs:
        reject_surrogates(text, location, column)
        if context[max(0, start) : max(0, start) + len(text)] != text or start < 0:
            upcoming = context[max(0, start) : max(0, start) + len(text)][:60]
            nearest = _nearest_start(context, text, start)
            hint = "The context does not have it." if nearest is None else f"It begins at {nearest}."
            raise InputError(
                f"{location}: column '{column}': {name}: the answer {text[:60]!r} is not at character {start}"
                f" of the context, where {upcoming!r} is. {hint}",
                code="answer-not-in-context",
            )
    return pairs


def _nearest_start(context: str, text: str, start: int) -> int | None:
    """Return where `text` begins in `context` nearest to `start`; None if it has it nowhere."""
    starts, index = list[int](), context.find(text)
    while index >= 0:
        starts.append(index)
        index = context.find(text, index + 1)
    return min(starts, key=lambda index: abs(index - start), default=None)


def _answer_pairs(value: Any, location: str) -> list[tuple[str, int]]:
    """Return text and start of each answer: an object of two lists, or a list of objects.

    Raises:
        InputError: it is neither, or a text is empty.
    """
    items: Any = value
    if isinstance(value, Mapping):
        texts, starts = value.get("text"), value.get("answer_start")
        items = None
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            items = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    pairs = []
    for item in items if isinstance(items, list) else [None]:
        text, start = (item.get(k) if isinstance(item, Mapping) else None for k in ("text", "answer_start"))
        if not isinstance(text, str) or not isinstance(start, int) or isinstance(start, bool):
            raise InputError(
                f"{location}: {repr(value)[:80]}; expected"
                ' {"text": ["Ada"], "answer_start": [17]} with lists of equal length, or'
                ' [{"text": "Ada", "answer_start": 17}]; empty lists for an unanswerable question.',
                code="wrong-column-type",
            )
        if not text.strip():
            raise InputError(
                f"{location}: an answer is empty. Remove it; an unanswerable question has no answers.",
                code="empty-text",
            )
        pairs.append((text, start))
    return pairs


def _single_answer(text: str, context: str, location: str, column: str) -> list[tuple[str, int]]:
    """Return an answer without its start, which the context must have once; none if it is empty.

    Raises:
        InputError: `ambiguous-answer`, `answer-not-in-context`.
    """
    if not text.strip():
        return []
    start = context.find(text)
    if start < 0:
        raise InputError(
            f"{location}: column '{column}': the context does not have the answer {text[:60]!r}. Copy it from"
            " the context, with the same spelling.",
            code="answer-not-in-context",
        )
    if context.find(text, start + 1) >= 0:
        raise InputError(
            f"{location}: column '{column}': the context has the answer {text[:60]!r} more than once. Give"
            ' its start: {"answers": {"text": ["..."], "answer_start": [0]}}.',
            code="ambiguous-answer",
        )
    return [(text, start)]


TASK = QuestionAnswering()
