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
    """A tokenizer that is to be trained on the texts of the training rows."""

    train: Literal["bpe", "unigram", "wordpiece"]
    vocab_size: int = Field(default=8000, ge=1, le=1_000_000)


class Untrained(Settings):
    """A model that is to be started from its config, without weights.

    config: a folder with config.json, or a .json file. tokenizer: a folder, a hub id, or how to train one; a
    model of texts needs it. image_size: of a model of images, pixels of either side, where neither a
    preprocessor_config.json beside the config nor the config says it.
    """

    config: Name
    tokenizer: Name | NewTokenizer | None = None
    image_size: int | None = Field(default=None, ge=1, le=4096)


class Shares(Settings):
    """Which share of the rows of `train` each split gets; see `smelt.core.shares`."""

    test: float | None = Field(default=None, gt=0, lt=1)
    validation: float | None = Field(default=None, gt=0, lt=1)

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
    """How texts become vectors, where the model's folder does not say it or something else is wanted.

    See `smelt.runtime.text.sentence_files.SentenceRules`; None takes what the model says.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    max_length: int | None = Field(default=None, ge=1)


class Data(Settings):
    """Where the rows of each split are: a file, relative to the recipe, or a hub id.

    unlabelled: texts for distillation, of which a teacher says what they are. split: what is taken out of
    `train`. prefix, source_language, target_language: what is put before each
    source text, and the languages of a multilingual model; None takes what the model says (see
    `smelt.planning.text_rules`). windows: how the text of a language model is cut. axes: of an ONNX model,
    which axis of an input's array holds the samples, by the input's name; null: none, the array is the same
    in every call. An output whose dimensions have no names may be named too.
    """

    train: Name | None = None
    unlabelled: Name | None = None
    validation: Name | None = None
    calibration: Name | None = None
    test: Name | None = None
    split: Shares = Shares()
    columns: Columns = Columns()
    windows: Windows = Windows()
    prefix: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    axes: dict[Name, Annotated[int, Field(ge=0, strict=True)] | None] = Field(default_factory=dict)

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
