"""The settings of `distill`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.compress.distill.layer_map import LayerMap
from smelt.compress.distill.weights import INNER, LossWeights, PhaseWeights
from smelt.compress.train.settings import LOSS, TrainingSettings
from smelt.core.data import SIMILARITY, TEXT_TO_TEXT, Task
from smelt.core.errors import SettingError
from smelt.core.scripts import BleuTokenizer
from smelt.core.stage import ModelFolder, RecipePath, RunningStep, Settings, StepNames, UsedModel

Layers = int | list[int]


class StudentSettings(Settings):
    """Which layers the student copies: their number, or a list of them, counted from 0."""

    encoder_layers: Layers | None = Field(
        default=None, description="encoder-decoder: number of encoder layers, or which, from 0"
    )
    decoder_layers: Layers | None = Field(default=None, description="likewise, decoder layers")
    layers: Layers | None = Field(default=None, description="likewise, models of one stack")
    config: RecipePath = Field(
        default=None, description="instead: config.json of a model with random weights"
    )
    model: ModelFolder = Field(default=None, description="instead: folder of a trained model")
    layer_selection: Literal["uniform", "first", "last"] = Field(
        default="uniform",
        description="which layers a number means",
    )

    @property
    def other(self) -> bool:
        """Whether the student is not made of layers of the step's model."""
        return self.config is not None or self.model is not None

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        said = sorted(self.model_fields_set - {"layer_selection"})
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
    """Sequence-level distillation: the teacher generates the targets."""

    num_beams: int = Field(default=5, ge=1, le=64, description="beams of the teacher's search")
    generator: RunningStep = Field(default=None, description="earlier step that generates instead")
    original_ratio: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="fraction of samples with their original target",
    )
    best_of: int | None = Field(
        default=None,
        ge=2,
        le=64,
        description="take the best of this many beams, by BLEU against the original target",
    )
    tokenize: BleuTokenizer | None = Field(
        default=None, description="tokenizer of that BLEU; default by language"
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, le=4096, description="longest target; default the teacher's"
    )
    length_penalty: float | None = Field(default=None, ge=-10, le=10, description="default the teacher's")
    batch_size: int = Field(default=32, ge=1, description="texts generated at once")

    @model_validator(mode="after")
    def _among_beams(self) -> Self:
        if self.best_of is not None and self.best_of > self.num_beams:
            raise SettingError(
                f"best_of: {self.best_of} candidates need as many beams; num_beams is {self.num_beams}",
                code="too-few-beams",
            )
        if self.num_beams == 1 and self.length_penalty is not None:
            raise SettingError("length_penalty has no effect with num_beams: 1", code="unused-setting")
        return self


class TeacherSettings(Settings):
    """A teacher that is not a step of the recipe."""

    model: UsedModel = Field(description="folder of a trained model")


class CacheSettings(Settings):
    """How much of the teacher's output is cached."""

    top_k: int = Field(
        default=32,
        ge=1,
        description="largest logits kept per position",
    )


class PhaseSettings(Settings):
    """One of several trainings; settings that it omits are those of the step."""

    losses: PhaseWeights = Field(description="as losses; default 0")
    epochs: float | None = Field(default=None, gt=0, description="default the step's")
    max_steps: int | None = Field(default=None, ge=1, description="default the step's")
    learning_rate: float | None = Field(default=None, gt=0, description="default the step's")
    metric_for_best_model: str | None = Field(
        default=None, description="default loss; in the last phase the step's"
    )


class DistillSettings(TrainingSettings):
    """Settings of `distill`."""

    student: StudentSettings | None = Field(
        default=None, description="a smaller model to train; default the step's input"
    )
    teacher: StepNames[TeacherSettings] = Field(
        default="model",
        description="earlier torch step, {model: FOLDER}, or a list of these; model: the original",
    )
    train_on: Literal["labelled", "unlabelled", "both"] = Field(
        default="labelled",
        description="samples of data.train, of data.unlabelled, or both",
    )
    temperature: float = Field(default=1.0, gt=0, description="softmax temperature of both models")
    losses: LossWeights = Field(
        default=LossWeights(), description="weights of the loss terms, 0 unless stated"
    )
    layer_map: LayerMap = Field(
        default="uniform",
        description="teacher layer for each student layer, as {1: 4}, or that per stack",
    )
    relation_heads: int | None = Field(
        default=None, ge=1, description="heads of self_attention_relations; default the teacher's"
    )
    sequence_level: SequenceSettings | None = Field(
        default=None,
        description="train on targets that the teacher generates",
    )
    cache_logits: CacheSettings | None = Field(
        default=None,
        description="run the teacher once per sample",
    )
    phases: tuple[PhaseSettings, ...] | None = Field(
        default=None, min_length=1, description="trainings in sequence"
    )

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
            labels = 0.0 if self.losses.logits or self.losses.reverse_kl else 1.0
        elif self.train_on != "labelled" and self.losses.from_teacher():  # the other rows have none
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
                "with `phases` each phase has its own losses; remove `losses`",
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
                f"with several teachers only outputs are compared; {', '.join(INNER)} need one teacher",
                code="several-teachers",
            )
        steps = len(teachers) == 1 and isinstance(teachers[0], str)
        if self.sequence_level is not None and self.sequence_level.generator is None and not steps:
            raise SettingError(
                "sequence_level: name the step that generates the targets with generator: STEP",
                code="missing-setting",
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
                f"layer_map has no effect without one of the losses {', '.join(INNER)}", code="unused-setting"
            )
        if self.relation_heads is not None and "self_attention_relations" not in inner:
            raise SettingError(
                "relation_heads has no effect without the loss self_attention_relations",
                code="unused-setting",
            )
        return self

    def without_noise(self) -> Self:
        """Return the same without dropout, where a teacher's logits alone teach and nothing is said of it.

        Dropout keeps a model from learning labels by heart. A student that is to say what a teacher says is
        kept from that by it (measured: docs/measurements/rates.md).
        """
        w = self.losses
        alone = (w.logits or w.reverse_kl) and w.labels == 0 and not w.of_inner()
        return self.model_copy(update={"dropout": 0.0}) if alone and self.dropout is None else self

    def answers_suffice(self, task: Task) -> bool:
        """Return whether this training learns from what the teacher gives, and looks at nothing inside it."""
        w, vectors = self.losses, self.losses.of_vectors()
        given = (
            vectors["sentence_embedding"] or vectors["pairwise_similarity"]
            if task == SIMILARITY
            else w.logits or w.reverse_kl
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
            judge = {} if last else {"metric_for_best_model": LOSS, "sparsify": None, "learned_masks": None}
            found.append(self.model_copy(update={**judge, **said, "losses": phase.losses, "phases": None}))
        return found
