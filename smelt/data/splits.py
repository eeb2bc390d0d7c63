"""Samples for training, calibration and scoring, and how running text is cut into windows.

`smelt.tasks.read_split` reads the samples.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.files import json_hash
from smelt.core.messages import Message, error_message
from smelt.data.audio import audio_hash
from smelt.data.images import image_hash
from smelt.data.npz_arrays import SampleArrays
from smelt.data.tasks import Task, task_traits


class _ColumnOption(NamedTuple):
    """roles: those that the command reads; empty: all. is_name_only: its value is NAME, not ROLE=NAME."""

    roles: tuple[str, ...]
    is_name_only: bool


_column_option: ContextVar[_ColumnOption | None] = ContextVar("column_option", default=None)


@contextmanager
def column_options(*roles: str, is_name_only: bool = False) -> Iterator[None]:
    """Let errors about columns name the option `--column` of a command, which reads the columns `roles`."""
    token = _column_option.set(_ColumnOption(roles, is_name_only))
    try:
        yield
    finally:
        _column_option.reset(token)


def columns_hint(names: Mapping[str, str]) -> str:
    """Return how to set the columns `names`, by role, in a recipe; in `column_options` by the option."""
    if (option := _column_option.get()) is None:
        example = ", ".join(f"{role}: {name}" for role, name in names.items())
        return f"Name the right {'one' if len(names) == 1 else 'ones'} with data: {{columns: {{{example}}}}}."
    values = [
        name if option.is_name_only else f"{role}={name}"
        for role, name in names.items()
        if not option.roles or role in option.roles
    ]
    return f"Set the right names with {' '.join(f'--column {shlex.quote(value)}' for value in values)}."


class Windows(BaseModel):
    """How running text is cut into windows for a language model: samples are joined, tokenized and cut."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    length: int | None = Field(
        default=None, ge=2, description="tokens per window; default: 1024, or the model's limit if smaller"
    )
    stride: int | None = Field(
        default=None,
        ge=1,
        description="tokens between the starts of two windows when scoring; smaller: more context,"
        " slower; default: length",
    )
    separator: str | None = Field(
        default=None,
        description="text between two samples; default: a line break for plain text, else an empty line",
    )

    @model_validator(mode="after")
    def _check_stride(self) -> Windows:
        if self.length is not None and self.stride is not None and self.stride > self.length:
            raise SettingError(
                f"stride {self.stride} is larger than length {self.length}, so text between two"
                " windows would be skipped; set stride to at most length",
                code="settings-conflict",
            )
        return self


SplitName = Literal["train", "unlabeled", "validation", "calibration", "test"]
# Layouts of the samples of text generation; see smelt.data.prompt_rows.
PromptLayout = Literal["messages", "prompt", "instruction"]


# A class by index or name, a number (regression), or several classes or numbers; see smelt.data.labels.
Label = int | str | float | tuple[int | str | float, ...]


class Columns(BaseModel):
    """Names of the columns in the data; `examples` are usual ones, of which `smelt init` uses the first."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str = Field(
        default="source",
        description="source text",
        examples=["source", "src", "input", "document", "article", "dialogue", "text", "en"],
    )
    target: str = Field(
        default="target",
        description="target text",
        examples=["target", "tgt", "summary", "highlights", "abstract", "output", "de", "fr"],
    )
    references: str = Field(default="targets", description="list of target texts; takes precedence")
    text: str = Field(
        default="text",
        description="text",
        examples=[
            "text",
            "sentence",
            "sentence1",
            "premise",
            "question",
            "query",
            "content",
            "review",
            "document",
            "caption",
        ],
    )
    text_pair: str = Field(
        default="text_pair",
        description="second text",
        examples=["text_pair", "sentence2", "hypothesis", "passage", "answer"],
    )
    image: str = Field(
        default="image",
        description="image",
        examples=["image", "file_name", "filename", "image_path", "path", "file", "img"],
    )
    audio: str = Field(
        default="audio",
        description="file of audio",
        examples=["audio", "audio_path", "wav", "file_name", "path", "file"],
    )
    transcript: str = Field(
        default="text",
        description="transcript of the audio",
        examples=["text", "transcript", "transcription", "sentence", "target"],
    )
    label: str = Field(
        default="label",
        description="label",
        examples=[
            "label",
            "labels",
            "category",
            "class",
            "intent",
            "sentiment",
            "stars",
            "score",
            "similarity",
        ],
    )
    prompt: str = Field(
        default="prompt", description="prompt", examples=["prompt", "question", "query", "problem"]
    )
    response: str = Field(
        default="response",
        description="response to the prompt",
        examples=["response", "answer", "completion", "solution", "output"],
    )
    responses: str = Field(default="responses", description="list of responses; takes precedence")
    instruction: str = Field(default="instruction", description="instruction")
    input: str = Field(default="input", description="input of an instruction")
    output: str = Field(default="output", description="response to an instruction")
    choices: str = Field(default="choices", description="list of texts of which one is the right response")
    answer: str = Field(
        default="answer",
        description="the right choice: its text, or its index from 0; of a question the text of its answer",
    )
    messages: str = Field(default="messages", description="list of messages with role and content")
    tokens: str = Field(default="tokens", description="list of words", examples=["tokens", "words"])
    tags: str = Field(
        default="tags",
        description="list with the tag of each word",
        examples=["tags", "ner_tags", "pos_tags", "labels", "label"],
    )
    entities: str = Field(
        default="entities",
        description="list of entities of a text, with start, end (characters) and label",
        examples=["entities", "spans"],
    )
    question: str = Field(default="question", description="question", examples=["question", "query"])
    context: str = Field(
        default="context",
        description="text with the answer to a question",
        examples=["context", "passage", "paragraph", "document"],
    )
    answers: str = Field(
        default="answers",
        description="answers to a question: text and answer_start (characters); none: it is unanswerable",
        examples=["answers"],
    )


@dataclass(frozen=True, slots=True)
class Example:
    """One sample: a text, and its target in the task.

    Translation, summarization, text generation: `references`; classification: `label`, optionally
    `text_pair`; sentence similarity: optionally `text_pair`, and with it optionally the score as a float
    `label`; image classification: `label`, and an image reference as the text; speech recognition:
    `references`, and the path of the audio as the text; token classification: the tag of each word as
    `label`; question answering: the context as `text_pair`, the answers as `references`, and the first
    character of each as `label`, both empty if the question is unanswerable.

    words: of a sample that is split into words; its text is the words joined with spaces. Empty: the words of
    the text are `smelt.data.tags.split_words`.

    word_lines: the line of each word, of files with a line for each; no part of the content either.

    choices: of a sample of text generation, texts of which `references[0]` is the right one; `answer`: its
    index. Empty for a sample without choices.
    line: its line in the file, None if the file has no lines or several samples in this one; row: its
    number in the file, from 1; None without a file. layout: of a row of text generation. None of these is
    part of the content.
    """

    text: str
    references: tuple[str, ...] = ()
    text_pair: str | None = None
    label: Label | None = None
    choices: tuple[str, ...] = ()
    answer: int | None = None
    words: tuple[str, ...] = ()
    word_lines: tuple[int, ...] = field(default=(), compare=False)
    line: int | None = field(default=None, compare=False)
    row: int | None = field(default=None, compare=False)
    layout: PromptLayout | None = field(default=None, compare=False)


# Raise it whenever the same text and settings give other windows.
WINDOWS_VERSION = 2
# The same for the tokens of prompts and responses.
RESPONSES_VERSION = 2


@dataclass(frozen=True)
class Split:
    """The samples of one split, in file order, and their origin.

    windows: how samples are joined and cut; only for language modeling. arrays: the values of samples
    that are arrays; the text of an example is then its index. images: the texts are references to
    images. audio: they are paths of audio.
    """

    origin: str
    examples: tuple[Example, ...] = field(repr=False)
    windows: Windows | None = None
    arrays: SampleArrays | None = field(default=None, repr=False, compare=False)
    images: bool = False
    audio: bool = False

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the samples' content; independent of the file's path."""
        if self.arrays is not None:
            return self.arrays.fingerprint
        content_hash = json_hash(
            [
                [text, list(e.references), e.text_pair, e.label]
                + ([list(e.choices), e.answer] if e.choices else [])
                + ([list(e.words)] if e.words else [])
                for text, e in zip(self.row_contents, self.examples, strict=True)
            ]
        )
        if self.examples and self.examples[0].layout is not None:
            return json_hash([content_hash, RESPONSES_VERSION])
        return (
            content_hash
            if self.windows is None
            else json_hash([content_hash, self.windows.model_dump(), WINDOWS_VERSION])
        )

    @cached_property
    def row_contents(self) -> tuple[str, ...]:
        """The content of each sample without its label: its text, or a hash of an image or of arrays."""
        if self.arrays is not None:
            return self.arrays.sample_hashes
        if self.audio:
            return tuple(audio_hash(example.text) for example in self.examples)
        return tuple(image_hash(e.text) if self.images else e.text for e in self.examples)

    def select(self, places: Iterable[int]) -> Split:
        """Return the samples at `places`."""
        if self.arrays is not None:
            return split_from_arrays(self.origin, self.arrays.select(list(places)))
        return replace(self, examples=tuple(self.examples[i] for i in places))

    def take(self, rows: int) -> Split:
        """Return the first `rows` samples."""
        return self.select(range(min(rows, len(self))))

    @property
    def has_choices(self) -> bool:
        """Whether the samples have choices; all of a split have, or none."""
        return bool(self.examples) and bool(self.examples[0].choices)

    @property
    def has_labels(self) -> bool:
        """Whether the samples have labels; all of a split have, or none."""
        return bool(self.examples) and self.examples[0].label is not None


def split_from_arrays(origin: str, arrays: SampleArrays) -> Split:
    """Return the samples of `arrays` as a split."""
    placeholders = tuple(Example(str(index), row=index + 1) for index in range(arrays.num_samples))
    return Split(origin, placeholders, arrays=arrays)


def spread_indices(count: int, num_indices: int, seed: int) -> list[int]:
    """Return `num_indices` of the indices 0 to `count` - 1 (all if there are fewer), rising.

    One is drawn from each of `num_indices` equal parts, so that a sorted file is covered from end to end.
    """
    if num_indices >= count:
        return list(range(count))
    draw = random.Random(seed)
    return [
        draw.randrange(k * count // num_indices, (k + 1) * count // num_indices) for k in range(num_indices)
    ]


def input_texts(examples: Sequence[Example], task: Task) -> tuple[list[str], list[str | None] | None]:
    """Return the input texts of `examples`, and the second text of each.

    For sentence similarity the texts of a pair are separate inputs: all first ones, then all second ones.
    """
    texts = [e.text for e in examples]
    if task_traits(task).text_pair == "separate":
        return texts + [e.text_pair for e in examples if e.text_pair is not None], None
    return texts, [e.text_pair for e in examples]


def missing_labels_errors(
    task: Task, data: Mapping[str, Split], names: Sequence[str], instead: tuple[str, str] | None = None
) -> list[Message]:
    """Return the errors if a loss would be computed on samples without labels, or pairs without scores.

    Args:
        task: of the recipe.
        data: splits by name.
        names: of the splits to check, if they are in `data`.
        instead: a setting and its value that needs no labels.
    """
    unlabeled = [data[name] for name in names if name in data and not data[name].has_labels]
    if not (task_traits(task).classifies or task_traits(task).output == "embedding") or not unlabeled:
        return []
    hint = f" Or set {instead[0]}: {instead[1]}." if instead else ""
    setting = instead[0] if instead else None
    if task_traits(task).classifies:
        text = f"the samples of {unlabeled[0].origin} have no labels, which the loss needs."
        return [error_message("missing-labels", f"{text} Use samples with labels.{hint}", setting=setting)]
    return [
        error_message(
            "missing-scores",
            f"the samples of {unlabeled[0].origin} have no scores (column 'label'), which the loss needs. Use"
            " pairs with scores, or distill with losses: {sentence_embedding: 1.0, pairwise_similarity: 1.0},"
            f" which needs only texts.{hint}",
            setting=setting,
        )
    ]
