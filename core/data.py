"""The rows that models are trained, calibrated and scored on; `smelt.core.rows.examples` reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from smelt.core.files import hash_of
from smelt.core.rows.arrays import Arrays
from smelt.core.rows.images import content_hash
from smelt.core.windows import Windows

SplitName = Literal["train", "unlabelled", "validation", "calibration", "test"]
Task = Literal[
    "translation",
    "summarization",
    "text-classification",
    "language-modeling",
    "sentence-similarity",
    "image-classification",
    "custom",
]
# From arrays to arrays, whatever they mean: of an ONNX graph that somebody else exported.
CUSTOM: Task = "custom"
EVERY_TASK: tuple[Task, ...] = get_args(Task)
# The tasks that families of models are for.
TASKS: tuple[Task, ...] = tuple(task for task in EVERY_TASK if task != CUSTOM)
# The task in which a text becomes a vector; its rows are texts, or pairs of them, which are read one by one.
SIMILARITY: Task = "sentence-similarity"
# The task in which an image gets a label; the text of its rows is a reference (smelt.core.rows.images).
IMAGES: Task = "image-classification"
# Tasks whose models are classifiers.
CLASSIFICATION: frozenset[Task] = frozenset({"text-classification", IMAGES})
# The tasks of models that read texts.
TEXT_TASKS: tuple[Task, ...] = tuple(task for task in TASKS if task != IMAGES)
# Tasks in which a text becomes another text.
TEXT_TO_TEXT: frozenset[Task] = frozenset({"translation", "summarization"})


# A class by number or name, a number to be predicted, or several classes; see smelt.core.labels.
Label = int | str | float | tuple[int | str, ...]


class Columns(BaseModel):
    """Names of the columns in the data."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str = Field(default="source", description="source text")
    target: str = Field(default="target", description="target text")
    references: str = Field(default="targets", description="list of target texts; takes precedence")
    text: str = Field(default="text", description="text")
    text_pair: str = Field(default="text_b", description="second text")
    image: str = Field(default="image", description="image")
    label: str = Field(default="label", description="label")


@dataclass(frozen=True, slots=True)
class Example:
    """One row: a text, and what belongs to it in the task.

    Translation, summarization: `references`; classification: `label`, maybe `text_pair`; sentence similarity:
    maybe `text_pair`, and then maybe as `label` a float, how similar the two are; image classification:
    `label`, and as the text a reference to the image.

    line: where it stands in its file, None where that has no lines or more than one row in this one; row: its
    number in the file, from 1; None where it is of no file. Neither is a part of what the row says.
    """

    text: str
    references: tuple[str, ...] = ()
    text_pair: str | None = None
    label: Label | None = None
    line: int | None = field(default=None, compare=False)
    row: int | None = field(default=None, compare=False)


# Raised whenever the same text and settings are cut into other windows.
WINDOWS_VERSION = 2


@dataclass(frozen=True)
class Split:
    """The rows of one split, in file order, and where they came from.

    windows: how the rows are joined and cut again; only for language modeling. arrays: what the rows hold
    where they are arrays; the text of an example is then the place of its row in them. images: the texts are
    references to images.
    """

    origin: str
    examples: tuple[Example, ...] = field(repr=False)
    windows: Windows | None = None
    arrays: Arrays | None = field(default=None, repr=False, compare=False)
    images: bool = False

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the rows' content; equal rows give equal keys wherever they lie."""
        if self.arrays is not None:
            return self.arrays.fingerprint
        rows = hash_of(
            [
                [text, list(e.references), e.text_pair, e.label]
                for text, e in zip(self.contents, self.examples, strict=True)
            ]
        )
        return rows if self.windows is None else hash_of([rows, self.windows.model_dump(), WINDOWS_VERSION])

    @cached_property
    def contents(self) -> tuple[str, ...]:
        """What each row says besides its label: its text; of an image and of arrays a hash of the content."""
        if self.arrays is not None:
            return self.arrays.row_hashes
        return tuple(content_hash(e.text) if self.images else e.text for e in self.examples)

    def some(self, places: Iterable[int]) -> Split:
        """Return the rows at `places`."""
        if self.arrays is not None:
            return split_of(self.origin, self.arrays.some(list(places)))
        return replace(self, examples=tuple(self.examples[i] for i in places))

    def head(self, rows: int) -> Split:
        """Return the first `rows` rows."""
        return self.some(range(min(rows, len(self))))

    @property
    def labelled(self) -> bool:
        """Whether the rows have labels; of one split all have, or none."""
        return bool(self.examples) and self.examples[0].label is not None


def split_of(origin: str, arrays: Arrays) -> Split:
    """Return the rows of `arrays` as a split."""
    rows = tuple(Example(str(at), row=at + 1) for at in range(arrays.rows))
    return Split(origin, rows, arrays=arrays)


def texts_read(examples: Sequence[Example], task: Task) -> tuple[list[str], list[str | None] | None]:
    """Return the texts that a model reads for `examples`, and the second text that it reads with each.

    For sentence similarity the two texts of a pair are read alone: first all first ones, then the others.
    """
    texts = [e.text for e in examples]
    if task == SIMILARITY:
        return texts + [e.text_pair for e in examples if e.text_pair is not None], None
    return texts, [e.text_pair for e in examples]
