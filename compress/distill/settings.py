"""The settings of `distill`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.compress.distill.layer_map import LayerMap
from smelt.compress.distill.loss_weights import INNER_LOSSES, LossWeights, PhaseWeights
from smelt.compress.train.settings import LOSS_METRIC, TrainingSettings
from smelt.core.bleu_tokenizer import BleuTokenizer
from smelt.core.data import SENTENCE_SIMILARITY, TEXT_TO_TEXT_TASKS, Task
from smelt.core.errors import SettingError
from smelt.core.stage import ModelFolder, RecipePath, RunnableStep, Settings, StepNames, UnchangedModelFolder

LayerChoice = int | list[int]


class StudentSettings(Settings):
    """Layers that the student copies: their number, or a list of indices from 0."""

    encoder_layers: LayerChoice | None = Field(
        default=None, description="encoder-decoder: number of encoder layers, or their indices from 0"
    )
    decoder_layers: LayerChoice | None = Field(default=None, description="likewise, decoder layers")
    layers: LayerChoice | None = Field(default=None, description="likewise, models of one stack")
    config: RecipePath = Field(
        default=None, description="instead: config.json of a model with random weights"
    )
    model: ModelFolder = Field(default=None, description="instead: folder of a trained model")
    layer_selection: Literal["uniform", "first", "last"] = Field(
        default="uniform",
        description="layers that are copied if a number is given",
    )

    @property
    def is_external(self) -> bool:
        """Whether the student is not cut from the step's model."""
        return self.config is not None or self.model is not None

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        said = sorted(self.model_fields_set - {"layer_selection"})
        if self.is_external and len(said) > 1:
            raise SettingError(
                f"set only one of {', '.join(said)} for the student",
                code="settings-conflict",
            )
        return self

    @field_validator("encoder_layers", "decoder_layers", "layers")
    @classmethod
    def _positive(cls, value: LayerChoice | None) -> LayerChoice | None:
        if (isinstance(value, int) and value < 1) or value == []:
            raise SettingError("the student keeps no layer; keep at least one", code="nothing-kept")
        return value


class SequenceSettings(Settings):
    """Sequence-level distillation: the teacher generates the targets."""

    num_beams: int = Field(default=5, ge=1, le=64, description="number of beams of the teacher's search")
    generator: RunnableStep = Field(
        default=None, description="earlier step that generates the targets instead of the teacher"
    )
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
        default=None, description="tokenizer for this BLEU; default: by language"
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, le=4096, description="longest target in tokens; default: the teacher's"
    )
    length_penalty: float | None = Field(default=None, ge=-10, le=10, description="default: the teacher's")
    batch_size: int = Field(default=32, ge=1, description="samples generated at once")

    @model_validator(mode="after")
    def _among_beams(self) -> Self:
        if self.best_of is not None and self.best_of > self.num_beams:
            raise SettingError(
                f"best_of: {self.best_of} needs num_beams >= best_of; num_beams is {self.num_beams}",
                code="too-few-beams",
            )
        if self.num_beams == 1 and self.length_penalty is not None:
            raise SettingError("length_penalty has no effect with num_beams: 1", code="unused-setting")
        return self


class TeacherSettings(Settings):
    """A teacher from a folder, not a step of the recipe."""

    model: UnchangedModelFolder = Field(description="folder of a trained model")


class CacheSettings(Settings):
    """How much of the teacher's output is cached."""

    top_k: int = Field(
        default=32,
        ge=1,
        description="largest logits kept per position",
    )


class PhaseSettings(Settings):
    """One of several trainings in sequence; settings that it omits are taken from the step."""

    losses: PhaseWeights = Field(description="as in losses; default 0")
    epochs: float | None = Field(default=None, gt=0, description="default: the step's")
    max_steps: int | None = Field(default=None, ge=1, description="default: the step's")
    learning_rate: float | None = Field(default=None, gt=0, description="default: the step's")
    metric_for_best_model: str | None = Field(
        default=None, description="default: loss; in the last phase the step's"
    )


class DistillSettings(TrainingSettings):
    """Settings of `distill`."""

    student: StudentSettings | None = Field(
        default=None, description="a smaller model to train; default: the step's input"
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
        default=None, ge=1, description="heads of self_attention_relations; default: the teacher's"
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

    def resolve_for_task(self, task: Task) -> Self:
        """Return the same settings with the task's default weights.

        Models that generate text learn from the teacher's distribution only, classifiers also from labels
        (measured: docs/measurements/rates.md). Without a loss on the teacher's outputs, labels have weight,
        so that the output is trained in addition to inner states.
        """
        if self.losses.labels is not None or self.phases is not None or task == SENTENCE_SIMILARITY:
            return self
        labels = 0.5
        if task in TEXT_TO_TEXT_TASKS or task == "language-modeling":
            labels = 0.0 if self.losses.logits or self.losses.reverse_kl else 1.0
        elif self.train_on != "labelled" and self.losses.uses_teacher():  # the other samples have no labels
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
        return tuple(value) if isinstance(value, list) else value  # JSON has lists instead of tuples

    @model_validator(mode="after")
    def _teachers_together(self) -> Self:
        teachers = self.all_teachers()
        if not teachers:
            raise SettingError("teacher: the list is empty. Add at least one teacher", code="missing-setting")
        if len(teachers) > 1 and any(training.losses.inner_weights() for training in self.phase_settings()):
            raise SettingError(
                f"with several teachers only their outputs are compared; for {', '.join(INNER_LOSSES)}"
                " use one teacher",
                code="several-teachers",
            )
        steps = len(teachers) == 1 and isinstance(teachers[0], str)
        if self.sequence_level is not None and self.sequence_level.generator is None and not steps:
            raise SettingError(
                "sequence_level: only a teacher that is a single step generates the targets itself."
                " Set generator: STEP",
                code="missing-setting",
            )
        return self

    @property
    def replaces_model(self) -> bool:
        """Whether the student is not the step's input model."""
        return self.student is not None and self.student.is_external

    def all_teachers(self) -> tuple[str | TeacherSettings, ...]:
        """Return all teachers."""
        return (self.teacher,) if isinstance(self.teacher, str) else self.teacher

    @model_validator(mode="after")
    def _looks_where_it_says(self) -> Self:
        inner = {name for training in self.phase_settings() for name in training.losses.inner_weights()}
        if self.layer_map != "uniform" and not inner:
            raise SettingError(
                f"layer_map has no effect without one of the losses {', '.join(INNER_LOSSES)}",
                code="unused-setting",
            )
        if self.relation_heads is not None and "self_attention_relations" not in inner:
            raise SettingError(
                "relation_heads has no effect without the loss self_attention_relations",
                code="unused-setting",
            )
        return self

    def without_default_dropout(self) -> Self:
        """Return the same settings without dropout if only a teacher's logits are learned and it is not set.

        Dropout keeps a model from overfitting labels; it keeps a student from matching its teacher
        (measured: docs/measurements/rates.md).
        """
        w = self.losses
        alone = (w.logits or w.reverse_kl) and w.labels == 0 and not w.inner_weights()
        return self.model_copy(update={"dropout": 0.0}) if alone and self.dropout is None else self

    def needs_only_outputs(self, task: Task) -> bool:
        """Return whether this training uses the teacher's outputs only, no inner states."""
        w, vectors = self.losses, self.losses.vector_weights()
        given = (
            vectors["sentence_embedding"] or vectors["pairwise_similarity"]
            if task == SENTENCE_SIMILARITY
            else w.logits or w.reverse_kl
        )
        return bool(given) and not w.inner_weights()

    def phase_settings(self) -> list[DistillSettings]:
        """Return the settings of each training, in order: one per phase, or those of the step."""
        if self.phases is None:
            return [self]
        found = []
        for number, phase in enumerate(self.phases, 1):
            said = phase.model_dump(exclude={"losses"}, exclude_none=True)
            # a metric on outputs is meaningless while inner states are being fitted; gradual sparsity and
            # masks run in one phase only
            last = number == len(self.phases)
            judge = (
                {}
                if last
                else {"metric_for_best_model": LOSS_METRIC, "sparsify": None, "learned_masks": None}
            )
            found.append(self.model_copy(update={**judge, **said, "losses": phase.losses, "phases": None}))
        return found
