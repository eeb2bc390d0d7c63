"""What a recipe starts from: the keys `model` and `data`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from smelt.core.data import Columns
from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.core.windows import Windows
from smelt.runtime.text.sentence_files import Pooling

# of a file, a folder, or something on the hub
Name = Annotated[str, Field(min_length=1)]


class NewTokenizer(Settings):
    """A tokenizer that is trained on the texts of the training samples."""

    train: Literal["bpe", "unigram", "wordpiece"] = Field(description="kind to train")
    vocab_size: int = Field(default=8000, ge=1, le=1_000_000, description="number of tokens")


class Untrained(Settings):
    """A model that starts from its config, without weights."""

    config: Name = Field(description="config.json or its folder")
    tokenizer: Name | NewTokenizer | None = Field(
        default=None, description="folder, hub id, or how to train one"
    )
    image_size: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="image models: pixels per side, if no file states it",
    )


class Shares(Settings):
    """The fraction of `train` that each split gets; see `smelt.core.shares`."""

    test: float | None = Field(default=None, gt=0, lt=1, description="fraction of train")
    validation: float | None = Field(default=None, gt=0, lt=1, description="fraction of train")

    @model_validator(mode="after")
    def _leaves_some(self) -> Self:
        if sum(self.given().values()) >= 1:
            raise SettingError(
                "the shares leave nothing to train on; together they must be less than 1",
                code="shares-too-large",
            )
        return self

    def given(self) -> dict[str, float]:
        """Return the shares that are named, by split."""
        return self.model_dump(exclude_none=True)


class Embedding(Settings):
    """How texts become vectors; None takes the model's own rule.

    See `smelt.runtime.text.sentence_files.SentenceRules`.
    """

    pooling: Pooling | None = Field(default=None, description="default the model's")
    normalize: bool | None = Field(default=None, description="vectors of length 1; default the model's")
    max_length: int | None = Field(
        default=None, ge=1, description="longest text in tokens; default the model's"
    )


class Data(Settings):
    """The data of each split: a file, relative to the recipe, or a hub id.

    None in prefix, source_language and target_language takes what the model's files have (see
    `smelt.planning.text_rules`).
    """

    train: Name | None = Field(default=None, description="training samples")
    unlabelled: Name | None = Field(default=None, description="samples without labels, for `distill`")
    validation: Name | None = Field(default=None, description="samples for choosing weights and settings")
    calibration: Name | None = Field(default=None, description="default train")
    test: Name | None = Field(default=None, description="samples that are scored; no stage reads them")
    split: Shares = Field(default=Shares(), description="fractions of train for other splits")
    columns: Columns = Field(default=Columns(), description="names of the columns")
    windows: Windows = Field(default=Windows(), description="language models: how text is cut")
    prefix: str | None = Field(default=None, description="text before each source; default the model's")
    source_language: str | None = Field(
        default=None, description="multilingual models: language of the sources"
    )
    target_language: str | None = Field(
        default=None, description="language of the targets, also for BLEU's tokenizer"
    )
    axes: dict[Name, Annotated[int, Field(ge=0, strict=True)] | None] = Field(
        default_factory=dict,
        description="ONNX models: axis of the samples, by input or output; null: not batched",
    )

    def splits(self) -> dict[str, str]:
        """Return where the rows of each split come from, by its name; parts of `train` from there."""
        names = ("train", "unlabelled", "validation", "calibration", "test")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        parts = dict.fromkeys(self.split.given(), self.train) if self.train is not None else {}
        return {name: origin for name in names if (origin := found.get(name, parts.get(name))) is not None}

    def files(self) -> dict[str, str]:
        """Return what has to be read: the origin of each split that is no part of another, by its name."""
        parts = self.split.given() if self.train is not None else {}
        return {name: origin for name, origin in self.splits().items() if name not in parts}
