"""Settings of the recipe keys `model`, `data` and `embedding`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from smelt.core.data import Columns
from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.core.window_settings import Windows
from smelt.runtime.text.sentence_files import Pooling

# name of a file, a folder or a hub repository
NonEmptyText = Annotated[str, Field(min_length=1)]


class NewTokenizer(Settings):
    """A new tokenizer, trained on the texts of the training samples."""

    train: Literal["bpe", "unigram", "wordpiece"] = Field(description="type of tokenizer to train")
    vocab_size: int = Field(default=8000, ge=1, le=1_000_000, description="number of tokens")


class UntrainedModel(Settings):
    """A model initialized from its config with random weights."""

    config: NonEmptyText = Field(description="config.json or its folder")
    tokenizer: NonEmptyText | NewTokenizer | None = Field(
        default=None, description="folder, hub id, or settings to train one"
    )
    image_size: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="image models: pixels per side, if the config does not set it",
    )


class SplitFractions(Settings):
    """The fraction of `train` that is moved to each split; see `smelt.core.split_division`."""

    test: float | None = Field(default=None, gt=0, lt=1, description="fraction of train")
    validation: float | None = Field(default=None, gt=0, lt=1, description="fraction of train")

    @model_validator(mode="after")
    def _require_remainder(self) -> Self:
        if sum(self.named_fractions().values()) >= 1:
            raise SettingError(
                "the fractions leave no training samples. Their sum must be less than 1",
                code="shares-too-large",
            )
        return self

    def named_fractions(self) -> dict[str, float]:
        """Return the fractions that are set, by split."""
        return self.model_dump(exclude_none=True)


class EmbeddingSettings(Settings):
    """Pooling and normalization of a sentence embedder; None uses the model's own value.

    See `smelt.runtime.text.sentence_files.SentenceRules`.
    """

    pooling: Pooling | None = Field(default=None, description="default: the model's")
    normalize: bool | None = Field(
        default=None, description="scale vectors to length 1; default: the model's"
    )
    max_length: int | None = Field(
        default=None, ge=1, description="longest text in tokens; default: the model's"
    )


class DataSettings(Settings):
    """The data of each split: a file relative to the recipe, or a hub id.

    None in prefix, source_language and target_language uses the values of the model's files (see
    `smelt.planning.text_rules`).
    """

    train: NonEmptyText | None = Field(default=None, description="training samples")
    unlabelled: NonEmptyText | None = Field(default=None, description="samples without labels, for `distill`")
    validation: NonEmptyText | None = Field(
        default=None, description="samples for choosing weights and settings"
    )
    calibration: NonEmptyText | None = Field(
        default=None, description="samples for calibration; default: train"
    )
    test: NonEmptyText | None = Field(default=None, description="samples for scoring; no stage reads them")
    split: SplitFractions = Field(
        default=SplitFractions(), description="fractions of train to use as other splits"
    )
    columns: Columns = Field(default=Columns(), description="names of the columns")
    windows: Windows = Field(default=Windows(), description="language models: how text is split into windows")
    prefix: str | None = Field(default=None, description="text before each source; default: the model's")
    source_language: str | None = Field(
        default=None, description="multilingual models: language of the sources"
    )
    target_language: str | None = Field(
        default=None, description="language of the targets, also for BLEU's tokenizer"
    )
    axes: dict[NonEmptyText, Annotated[int, Field(ge=0, strict=True)] | None] = Field(
        default_factory=dict,
        description="ONNX models: batch axis of each input or output; null: none",
    )

    def split_sources(self) -> dict[str, str]:
        """Return the source of each split by name; splits taken from `train` have the source of `train`."""
        names = ("train", "unlabelled", "validation", "calibration", "test")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        parts = dict.fromkeys(self.split.named_fractions(), self.train) if self.train is not None else {}
        return {name: origin for name in names if (origin := found.get(name, parts.get(name))) is not None}

    def split_files(self) -> dict[str, str]:
        """Return the sources to read: those of the splits that are not taken from `train`, by name."""
        parts = self.split.named_fractions() if self.train is not None else {}
        return {name: origin for name, origin in self.split_sources().items() if name not in parts}
