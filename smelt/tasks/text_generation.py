"""Text generation: a response to a prompt, an instruction or a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from smelt.data.examples import (
    COLUMN_ALIASES,
    MissingColumnError,
    integral_as_int,
    missing_column,
    nonempty_text,
    parse_references,
    reject_surrogates,
    text_of_column,
)
from smelt.data.labels import require_all_or_none
from smelt.data.prompt_rows import (
    LAYOUT_COLUMNS,
    conversation_text,
    parse_choices,
    parse_conversation,
    parse_messages,
    right_choice,
    row_layout,
)
from smelt.data.splits import Columns, Example, Split, columns_hint
from smelt.tasks.spec import PackageClass, TaskSpec

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.tasks.samples import EncodedSample


class TextGeneration(TaskSpec):
    """Text generation."""

    name = "text-generation"
    column_roles = ("prompt", "response")
    row_example = '{"prompt": "...", "response": "..."}, or {"messages": [...]}'
    suggested_metrics = (
        "rougeL",
        "token_f1",
        "exact_match",
        "response_perplexity",
    )
    main_metric = "rougeL"
    package = PackageClass("text_generation", "Answerer", 'print(Answerer()(["PROMPT", "ANOTHER"]))')

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, as `TaskSpec.parse_row`."""
        return (_parse_unanswered if lacks_target else _parse_prompted)(row, location, columns)

    def lacks_target(self, row: Mapping[str, Any], columns: Columns) -> bool:
        """Return whether a row has no response; one of a conversation is its last turn, of the assistant."""
        layout = row_layout(row, columns)
        if layout == "messages":
            return not _ends_with_response(row[columns.messages])
        roles = ("output" if layout == "instruction" else "response", "responses")
        return all(row.get(getattr(columns, role)) in (None, "") for role in roles)

    def required_roles(self, row: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return no roles: the error about a missing prompt names all of them."""
        return ()

    def check_examples(self, examples: Sequence[Example], columns: Columns) -> None:
        """Require that all samples have choices, or none."""
        lines = [example.line or number for number, example in enumerate(examples, start=1)]
        has_choices = (bool(example.choices) for example in examples)
        require_all_or_none(has_choices, lines, columns.choices, "list of choices")

    def recognizes_row(self, row: Mapping[str, Any], columns: Columns, named: Columns) -> bool:
        """Return whether the row has a prompt, and not only text."""
        return Columns().text not in row or row_layout(row, named) is not None

    def token_rows(self, split: Split, tokenizer: Any) -> list[list[int]]:
        """Return the ids of each prompt with its response, as `TaskSpec.token_rows`."""
        from smelt.generation.prompt_batches import encode_responses

        pairs = [(example.text, reference) for example in split.examples for reference in example.references]
        return [turn.ids for turns in encode_responses(pairs, tokenizer, every_turn=True) for turn in turns]

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return prompts with their responses as windows, whose targets are the tokens of the responses."""
        from smelt.generation.prompt_batches import encode_responses, fit_response
        from smelt.tasks.samples import EncodedSample

        prompt_pairs = [
            (example.text, reference) for example in split.examples for reference in example.references
        ]
        responses = [
            row
            for responses in encode_responses(prompt_pairs, tokenizer, every_turn=True)
            for row in responses
        ]
        truncated = [fit_response(row, limit, tokenizer.bos_token_id) for row in responses]
        count = sum(len(fitted.ids) < len(row.ids) for fitted, row in zip(truncated, responses, strict=True))
        return [EncodedSample(row.ids, None, None, is_target=row.is_target) for row in truncated], count

    def count_truncated(
        self, runner: Any, examples: Sequence[Example], generation: GenerationSettings
    ) -> int:
        """Return the number of prompts that are truncated: each leaves room for its new tokens."""
        from smelt.generation.prompt_batches import truncated_prompts

        texts = [example.text for example in examples]
        return truncated_prompts(runner, texts, runner.text.resolved_generation(generation, runner))[1]

    def too_long_samples(self, split: Split, tokenizer: Any, limit: int) -> set[int]:
        """Return the indices of samples whose prompt and response have more than `limit` inputs together."""
        from smelt.generation.prompt_batches import encode_responses

        prompt_pairs = [(e.text, reference) for e in split.examples for reference in e.references]
        owners = [i for i, e in enumerate(split.examples) for _ in e.references]
        encoded = encode_responses(prompt_pairs, tokenizer, every_turn=True)
        # the last token is never an input
        return {
            i
            for i, responses in zip(owners, encoded, strict=True)
            if any(len(row.ids) > limit + 1 for row in responses)
        }


def _ends_with_response(value: Any) -> bool:
    """Return whether a conversation ends with a turn of the assistant."""
    if isinstance(value, str):
        value = parse_conversation(value)
    return isinstance(value, list) and bool(value) and value[-1].get("role") == "assistant"


def _parse_unanswered(row: Mapping[str, Any], location: str, columns: Columns) -> Example:
    """Return a sample of text generation without a response; its conversation ends with the user's turn.

    Raises:
        InputError: as `parse_prompt`.
    """
    if row_layout(row, columns) == "messages":
        value = row[columns.messages]
        conversation = parse_conversation(value) if isinstance(value, str) else value
        if isinstance(conversation, list):
            placeholder = {"role": "assistant", "content": "-"}
            row = {**row, columns.messages: [*conversation, placeholder]}  # `parse_prompt` removes it
    return parse_prompt(row, location, columns)


def _parse_prompted(row: Mapping[str, Any], location: str, columns: Columns) -> Example:
    """Return a sample of text generation: a prompt with its responses.

    Raises:
        InputError: as `parse_prompt`; there is no response, or it is empty.
    """
    example = parse_prompt(row, location, columns)
    if example.layout == "messages":
        _, response = parse_messages(row[columns.messages], location, columns.messages)
        reject_surrogates(response, location, columns.messages)
        return _with_choices(replace(example, references=(response,)), row, location, columns)
    single = "output" if example.layout == "instruction" else "response"
    has_response = row.get(columns.responses) is not None or row.get(getattr(columns, single)) is not None
    if row.get(columns.choices) is not None and not has_response:
        return _with_choices(example, row, location, columns)
    responses = parse_references(row, location, columns.responses, getattr(columns, single), single)
    return _with_choices(replace(example, references=responses), row, location, columns)


def _with_choices(example: Example, row: Mapping[str, Any], location: str, columns: Columns) -> Example:
    """Return `example` with the choices of `row`, if it has some; the right one is its default reference.

    Raises:
        InputError: as `parse_choices` and `right_choice`, or a column is missing.
    """
    names_choices = bool({"choices", "answer"} & columns.model_fields_set)
    if row.get(columns.choices) is None or not (
        names_choices or columns.answer in row or not example.references
    ):
        if names_choices:
            raise missing_column(row, columns.choices, location, "choices")
        return example  # another column of this name
    choices = parse_choices(row[columns.choices], location, columns.choices)
    for choice in choices:
        reject_surrogates(choice, location, columns.choices)
    if columns.answer not in row:
        raise missing_column(row, columns.answer, location, "answer")
    answer_index = right_choice(integral_as_int(row[columns.answer]), choices, location, columns.answer)
    return replace(
        example,
        choices=choices,
        answer=answer_index,
        references=example.references or (choices[answer_index],),
    )


def parse_prompt(row: Mapping[str, Any], location: str, columns: Columns) -> Example:
    """Return the prompt of a row of text generation; see `smelt.data.prompt_rows` for the layouts of a row.

    Raises:
        InputError: a column is missing or has another type, a text is empty, or a conversation is invalid.
    """
    layout = row_layout(row, columns)
    if layout is None:
        raise _no_prompt(row, location, columns)
    if layout == "messages":
        before, _ = parse_messages(row[columns.messages], location, columns.messages)
        for message in before:
            reject_surrogates(message["content"], location, columns.messages)
        return Example(conversation_text(before), layout=layout)
    if layout == "prompt":
        return Example(nonempty_text(row, columns.prompt, location, "prompt"), layout=layout)
    text = nonempty_text(row, columns.instruction, location, "instruction")
    # a column named in the recipe must exist; the input of a row may be empty
    if row.get(columns.input) is not None or "input" in columns.model_fields_set:
        input_text = text_of_column(row, columns.input, location, "input")
        text = f"{text}\n\n{input_text}" if input_text.strip() else text
    return Example(text, layout=layout)


def _no_prompt(row: Mapping[str, Any], location: str, columns: Columns) -> MissingColumnError:
    """Return the error about a row that has no prompt, no instruction and no messages."""
    names = ", ".join(map(str, row)) or "none"
    roles = [(role, getattr(columns, role)) for role, *_ in LAYOUT_COLUMNS.values()]
    expected_names = ", ".join(f"'{name}'" for _, name in roles)
    prompt_column = next((name for name in COLUMN_ALIASES["prompt"] if name in row), None)
    response_column = next(
        (name for name in COLUMN_ALIASES["response"] if name in row and name != prompt_column), None
    )
    example_hint = columns_hint({"prompt": prompt_column or "NAME", "response": response_column or "NAME"})
    return MissingColumnError(
        f"{location}: none of the columns {expected_names}; available: {names}. {example_hint}",
        code="missing-column",
    )


TASK = TextGeneration()
