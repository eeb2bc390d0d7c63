"""The settings of `distill`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from smelt.compress.distill.layer_map import LayerMap
from smelt.compress.distill.weights import INNER, LossWeights, PhaseWeights
from smelt.compress.train.settings import LOSS, TrainingSettings
from smelt.core.data import SIMILARITY, TEXT_TO_TEXT, Task
from smelt.core.errors import SettingError
from smelt.core.scripts import BleuTokenizer
from smelt.core.stage import ModelFolder, RecipePath, RunningStep, Settings, StepNames, UsedModel

Layers = int | list[int]


class StudentSettings(Settings):
    """Which layers the student copies: a number, or a list of their places counted from 0."""

    encoder_layers: Layers | None = Field(default=None, description="encoder of an encoder-decoder")
    decoder_layers: Layers | None = Field(default=None, description="decoder of an encoder-decoder")
    layers: Layers | None = Field(default=None, description="classification, language modeling: of the model")
    config: RecipePath = Field(
        default=None, description="instead: a config.json (or its folder), whose weights are drawn"
    )
    model: ModelFolder = Field(default=None, description="instead: a folder with a model that was trained")
    choose: Literal["spread", "first", "last"] = Field(
        default="spread", description="which ones, where a number is given; spread: see docs/distill.md"
    )

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        return {n: value for n, value in found.items() if n not in ("config", "model") or value is not None}

    @property
    def other(self) -> bool:
        """Whether it is no cut of the model that the step gets."""
        return self.config is not None or self.model is not None

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        said = sorted(self.model_fields_set - {"choose"})
        if self.other and len(said) > 1:
            raise SettingError(
                f"a student is defined by one of {', '.join(said)}; remove the others",
                code="settings-conflict",
            )
        return self

    @field_validator("encoder_layers", "decoder_layers", "layers")
    @classmethod
    def _positive(cls, value: Layers | None) -> Layers | None:
        if (isinstance(value, int) and value < 1) or value == []:
            raise SettingError("a student keeps at least one layer", code="nothing-kept")
        return value


class SequenceSettings(Settings):
    """Targets that the teacher writes, for text to text."""

    beams: int = Field(default=5, ge=1, le=64, description="with which the teacher decodes the training rows")
    decoded_by: RunningStep = Field(
        default=None, description="an earlier step that decodes instead: the teacher's own graph, say (onnx)"
    )
    mix: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="fraction of the rows that have their own target",
    )
    best_of: int | None = Field(
        default=None,
        ge=2,
        le=64,
        description="of so many candidates the one most like the target is taken",
    )
    tokenize: BleuTokenizer | None = Field(
        default=None, description="how best_of's BLEU splits the targets; else as their language needs"
    )
    max_new_tokens: int | None = Field(default=None, ge=1, le=4096, description="else the teacher's own")
    length_penalty: float | None = Field(default=None, ge=-10, le=10, description="likewise")
    batch_size: int = Field(default=32, ge=1, description="texts that are decoded at once")

    @model_validator(mode="after")
    def _among_beams(self) -> Self:
        if self.best_of is not None and self.best_of > self.beams:
            raise SettingError(
                f"best_of: {self.best_of} candidates need as many beams; beams is {self.beams}",
                code="too-few-beams",
            )
        if self.beams == 1 and self.length_penalty is not None:
            raise SettingError("length_penalty means nothing without beams above 1", code="unused-setting")
        return self


class TeacherSettings(Settings):
    """A teacher that no step of the recipe makes."""

    model: UsedModel = Field(description="a folder with a trained model and the same tokenizer")


class KeepSettings(Settings):
    """How much of what the teacher says is kept."""

    top: int = Field(
        default=32,
        ge=1,
        description="so many of the largest logits of each position, and the sum of the others; all of them"
        " where there are no more, and always of classes and vectors",
    )


class PhaseSettings(Settings):
    """One training of several; what it does not say is as the step says."""

    losses: PhaseWeights = Field(description="weights of the loss's parts; those that are not named are 0")
    epochs: float | None = Field(default=None, gt=0, description="passes over the training rows")
    max_steps: int | None = Field(default=None, ge=1, description="number of updates; wins over epochs")
    learning_rate: float | None = Field(default=None, gt=0, description="highest learning rate of AdamW")
    select: str | None = Field(
        default=None, description="which checkpoint is kept: by loss, or a metric; of all but the last: loss"
    )

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        return {name: value for name, value in found.items() if value is not None}


class DistillSettings(TrainingSettings):
    """Settings of `distill`."""

    student: StudentSettings | None = Field(
        default=None, description="layers to keep; without it the model trains as it is (recovery)"
    )
    teacher: StepNames[TeacherSettings] = Field(
        default="model",
        description="name of an earlier torch step; `model` is the untouched one. Several as a list, also"
        " {model: FOLDER}",
    )
    rows: Literal["train", "unlabelled", "both"] = Field(
        default="train",
        description="on which rows it learns; data: {unlabelled: FILE} are texts of which the teacher alone"
        " says what they are",
    )
    temperature: float = Field(default=1.0, gt=0, description="softens both distributions")
    losses: LossWeights = Field(default=LossWeights(), description="weights of the loss's parts")
    layer_map: LayerMap = Field(
        default="uniform",
        description="which of the teacher's layers go with the student's: uniform, last, or {student's:"
        " teacher's} (0: embeddings), for all stacks or each by its name",
    )
    relation_heads: int | None = Field(
        default=None, ge=1, description="of the loss `relations`; by default the teacher's heads"
    )
    sequences: SequenceSettings | None = Field(
        default=None,
        description="the teacher writes the targets of the training rows",
    )
    keep_logits: KeepSettings | None = Field(
        default=None,
        description="the teacher is run once a row; what it says is kept in the store for what follows",
    )
    phases: tuple[PhaseSettings, ...] | None = Field(
        default=None, min_length=1, description="trainings one after the other, each with losses of its own"
    )

    unsaid: ClassVar[frozenset[str]] = TrainingSettings.unsaid | {
        "layer_map",
        "relation_heads",
        "sequences",
        "keep_logits",
        "rows",
        "phases",
    }

    def for_task(self, task: Task) -> Self:
        """Return the same, where the weight of labels is that of the task.

        Models that write texts learn from the teacher's distribution alone, classifiers from labels too
        (measured: docs/measurements/rates.md). Where nothing that the teacher says counts, labels do, so that
        what is written is trained too beside losses that look inside.
        """
        if self.losses.labels is not None or self.phases is not None or task == SIMILARITY:
            return self
        labels = 0.5
        if task in TEXT_TO_TEXT or task == "language-modeling":
            labels = 0.0 if self.losses.logits or self.losses.reverse_logits else 1.0
        elif self.rows != "train" and self.losses.from_teacher():  # the other rows have none
            labels = 0.0
        weights = {"logits": self.losses.logits, "labels": labels}
        return self.model_copy(update={"losses": self.losses.model_copy(update=weights)})

    @field_validator("student", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.phases is not None and "losses" in self.model_fields_set:
            raise SettingError(
                "the losses of phases stand in each of them; leave out `losses` beside `phases`",
                code="settings-conflict",
            )
        return self

    @field_validator("teacher", mode="before")
    @classmethod
    def _folder_of_teacher(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return (value,)
        return tuple(value) if isinstance(value, list) else value  # JSON's lists, which are no tuples here

    @model_validator(mode="after")
    def _teachers_together(self) -> Self:
        teachers = self.teachers()
        if not teachers:
            raise SettingError("teacher: name at least one", code="missing-setting")
        if len(teachers) > 1 and any(training.losses.of_inner() for training in self.trainings()):
            raise SettingError(
                f"several teachers are compared in what they say; {', '.join(INNER)} look inside one",
                code="several-teachers",
            )
        steps = len(teachers) == 1 and isinstance(teachers[0], str)
        if self.sequences is not None and self.sequences.decoded_by is None and not steps:
            raise SettingError(
                "sequences: say which step writes the targets, with decoded_by: STEP", code="missing-setting"
            )
        return self

    @property
    def begins_anew(self) -> bool:
        """Whether the student is another model than the step gets."""
        return self.student is not None and self.student.other

    def teachers(self) -> tuple[str | TeacherSettings, ...]:
        """Return all that teach."""
        return (self.teacher,) if isinstance(self.teacher, str) else self.teacher

    @model_validator(mode="after")
    def _looks_where_it_says(self) -> Self:
        inner = {name for training in self.trainings() for name in training.losses.of_inner()}
        if self.layer_map != "uniform" and not inner:
            raise SettingError(
                f"layer_map means nothing without one of the losses {', '.join(INNER)}", code="unused-setting"
            )
        if self.relation_heads is not None and "relations" not in inner:
            raise SettingError(
                "relation_heads means nothing without the loss relations", code="unused-setting"
            )
        return self

    def without_noise(self) -> Self:
        """Return the same without dropout, where a teacher's logits alone teach and nothing is said of it.

        Dropout keeps a model from learning labels by heart. A student that is to say what a teacher says is
        kept from that by it (measured: docs/measurements/rates.md).
        """
        w = self.losses
        alone = (w.logits or w.reverse_logits) and w.labels == 0 and not w.of_inner()
        return self.model_copy(update={"dropout": 0.0}) if alone and self.dropout is None else self

    def answers_suffice(self, task: Task) -> bool:
        """Return whether this training learns from what the teacher gives, and looks at nothing inside it."""
        w, vectors = self.losses, self.losses.of_vectors()
        given = (
            vectors["embedding"] or vectors["similarity"]
            if task == SIMILARITY
            else w.logits or w.reverse_logits
        )
        return bool(given) and not w.of_inner()

    def trainings(self) -> list[DistillSettings]:
        """Return the settings of each training, in order: of each phase, else the one of the step."""
        if self.phases is None:
            return [self]
        found = []
        for number, phase in enumerate(self.phases, 1):
            said = phase.model_dump(exclude={"losses"}, exclude_none=True)
            # a metric of texts says nothing of a model whose inner states are still being fitted, and what
            # goes while the weights train goes once
            last = number == len(self.phases)
            judge = {} if last else {"select": LOSS, "sparsify": None, "masks": None}
            found.append(self.model_copy(update={**judge, **said, "losses": phase.losses, "phases": None}))
        return found
