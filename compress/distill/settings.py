"""The settings of `distill`: loss weights, student and teachers."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.compress.distill.augmentation import AugmentationSettings
from smelt.compress.distill.layer_map import LayerMap, module_pairs
from smelt.compress.finetune import TechniqueTrainingSettings
from smelt.core.errors import SettingError
from smelt.core.messages import Message, error_message
from smelt.data.bleu_tokenizer import BleuTokenizer
from smelt.data.tasks import Task, task_traits
from smelt.models.families.layout import STACK_NAMES
from smelt.stage import ModelFolder, RecipePath, RunnableStep, Settings, StepNames, UnchangedModelFolder
from smelt.training.settings import LOSS_METRIC

# Terms on inner states of both models.
INNER_LOSSES = ("hidden_states", "input_embeddings", "cosine", "attention", "self_attention_relations")
# Terms for sentence embedders, with their defaults.
_VECTOR_LOSS_DEFAULTS = {"sentence_embedding": 1.0, "pairwise_similarity": 1.0, "cosent": 0.0}


class LossWeights(Settings):
    """Weights of the terms of the loss."""

    logits: float = Field(default=1.0, ge=0, description="T^2 KL(teacher || student)")
    labels: float | None = Field(
        default=None,
        ge=0,
        description="cross-entropy; default 0 for generated text (1.0 without logits), 0.5 for classes",
    )
    sentence_embedding: float | None = Field(
        default=None,
        ge=0,
        description="sentence-similarity: squared distance to the teacher's vectors; default 1.0",
    )
    pairwise_similarity: float | None = Field(
        default=None,
        ge=0,
        description="sentence-similarity: MSE of the cosines within a batch; default 1.0",
    )
    cosent: float | None = Field(
        default=None,
        ge=0,
        description="sentence-similarity: CoSENT loss on the order of the pairs' scores",
    )

    outputs: float | None = Field(
        default=None,
        ge=0,
        description="custom: MSE of the outputs; default 1.0 without logits",
    )
    reverse_kl: float | None = Field(default=None, ge=0, description="T^2 KL(student || teacher)")
    hidden_states: float | None = Field(
        default=None,
        ge=0,
        description="MSE of hidden states",
    )
    input_embeddings: float | None = Field(default=None, ge=0, description="MSE of the first layer's inputs")
    cosine: float | None = Field(default=None, ge=0, description="1 - cosine of the last hidden states")
    attention: float | None = Field(default=None, ge=0, description="MSE of attention scores before softmax")
    self_attention_relations: float | None = Field(
        default=None,
        ge=0,
        description="KL of the self-attention relations of queries, keys and values (MiniLMv2)",
    )

    def uses_teacher(self) -> bool:
        """Return whether any term uses the teacher."""
        return bool(self.logits or self.reverse_kl or self.outputs or self.inner_weights())

    def inner_weights(self) -> dict[str, float]:
        """Return the weights above 0 of the terms on inner states."""
        return {name: weight for name in INNER_LOSSES if (weight := getattr(self, name))}

    def vector_weights(self) -> dict[str, float]:
        """Return the weights of the terms that compare vectors."""
        weights = {name: getattr(self, name) for name in _VECTOR_LOSS_DEFAULTS}
        return {
            name: _VECTOR_LOSS_DEFAULTS[name] if value is None else value for name, value in weights.items()
        }

    def check_task(self, task: Task) -> list[Message]:
        """Return the errors, each with its setting: terms of another task, or no term at all."""
        output = task_traits(task).output
        task_terms = {
            "embedding": {*_VECTOR_LOSS_DEFAULTS, *INNER_LOSSES},
            "joint-embeddings": {*_VECTOR_LOSS_DEFAULTS, "labels"} - {"cosent"},
            "arrays": {"logits", "outputs", "hidden_states"},
        }.get(output, set(type(self).model_fields) - {*_VECTOR_LOSS_DEFAULTS, "outputs"})
        unknown = sorted(
            name for name in self.model_fields_set - task_terms if getattr(self, name) is not None
        )
        available = ", ".join(sorted(task_terms))
        errors = [
            error_message(
                "unknown-loss",
                f"no such loss term for {task}. Available: {available}.",
                setting=f"losses.{name}",
            )
            for name in unknown
        ]
        if task_traits(task).embeds and not any(self.vector_weights().values()) and not self.inner_weights():
            errors.append(
                error_message("no-loss", "all weights are 0; at least one must be above 0.", setting="losses")
            )
        return errors

    @model_validator(mode="after")
    def _check_weights(self) -> LossWeights:
        if self.labels == 0 and not self.uses_teacher():
            raise SettingError("all loss weights are 0; at least one must be above 0", code="no-loss")
        return self


class PhaseWeights(LossWeights):
    """Loss weights of one of several phases: terms that are not named have weight 0."""

    logits: float = Field(default=0.0, ge=0, description="T^2 KL(teacher || student)")
    labels: float = Field(default=0.0, ge=0, description="cross-entropy")
    sentence_embedding: float | None = Field(
        default=None,
        ge=0,
        description="sentence-similarity: squared distance to the teacher's vectors",
    )
    pairwise_similarity: float | None = Field(
        default=None,
        ge=0,
        description="sentence-similarity: MSE of the cosines within a batch",
    )

    def vector_weights(self) -> dict[str, float]:
        """Return the weights of the terms that compare vectors."""
        return {name: getattr(self, name) or 0.0 for name in _VECTOR_LOSS_DEFAULTS}

    @model_validator(mode="after")
    def _check_weights(self) -> PhaseWeights:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise SettingError("all weights are 0; at least one must be above 0", code="no-loss")
        return self


LayerChoice = int | list[int]


class StudentSettings(Settings):
    """Layers that the student copies: their number, or a list of indices from 0."""

    encoder_layers: LayerChoice | None = Field(
        default=None, description="encoder-decoder: number of encoder layers, or their indices from 0"
    )
    decoder_layers: LayerChoice | None = Field(default=None, description="likewise, decoder layers")
    layers: LayerChoice | None = Field(default=None, description="likewise, models of one stack")
    text_layers: LayerChoice | None = Field(
        default=None, description="likewise, of the text tower of image-text models"
    )
    vision_layers: LayerChoice | None = Field(default=None, description="likewise, their vision tower")
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

    def to_report(self) -> dict[str, Any]:
        """Return what a report shows: of an external student only where it comes from."""
        report = super().to_report()
        if self.is_external:
            return {name: value for name, value in report.items() if getattr(self, name) is not None}
        return report

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        explicit = sorted(self.model_fields_set - {"layer_selection"})
        if self.is_external and len(explicit) > 1:
            raise SettingError(
                f"set only one of {', '.join(explicit)} for the student",
                code="settings-conflict",
            )
        return self

    @field_validator(*STACK_NAMES)
    @classmethod
    def _check_layer_choice(cls, value: LayerChoice | None) -> LayerChoice | None:
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
    def _check_beams(self) -> Self:
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


class DistillSettings(TechniqueTrainingSettings):
    """Settings of `distill`."""

    student: StudentSettings | None = Field(
        default=None, description="a smaller model to train; default: the step's input"
    )
    teacher: StepNames[TeacherSettings] = Field(
        default="model",
        description="earlier torch step, {model: FOLDER}, or a list of these; model: the original",
    )
    train_on: Literal["labeled", "unlabeled", "both"] = Field(
        default="labeled",
        description="samples of data.train, of data.unlabeled, or both; the loss with labels then counts for"
        " those of train only",
    )
    augmentation: AugmentationSettings | None = Field(
        default=None, description="add copies of the training texts with replaced words, as TinyBERT"
    )
    temperature: float = Field(default=1.0, gt=0, description="softmax temperature of both models")
    losses: LossWeights = Field(
        default=LossWeights(), description="weights of the loss terms, 0 unless stated"
    )
    layer_map: LayerMap = Field(
        default="uniform",
        description="teacher layer for each student layer, as {1: 4}, or that per stack; of classifiers and"
        " modules of arrays also the teacher's module for each of the student, by name",
    )
    layer_reduction: Literal["sum", "mean"] = Field(
        default="sum", description="hidden_states and attention: sum or mean over the mapped layers"
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

    def to_report(self) -> dict[str, Any]:
        """Return what a report shows: with phases, only their losses."""
        report = super().to_report()
        if self.phases is not None:
            del report["losses"]
        return report

    def resolve_for_task(self, task: Task) -> Self:
        """Return the same settings with the task's default weights.

        Models that generate text learn from the teacher's distribution only, classifiers also from labels
        (measured: docs/measurements/rates.md). Without a loss on the teacher's outputs, labels have weight,
        so that the output is trained in addition to inner states.
        """
        if self.losses.labels is not None or self.phases is not None or task_traits(task).embeds:
            return self
        if task_traits(task).output == "arrays":
            # outputs count as logits only where a setting names them
            logits = self.losses.logits if "logits" in self.losses.model_fields_set else 0.0
            outputs = self.losses.outputs
            if outputs is None and not logits and not self.losses.inner_weights():
                outputs = 1.0
            array_weights = {"logits": logits, "outputs": outputs}
            return self.model_copy(update={"losses": self.losses.model_copy(update=array_weights)})
        labels = 0.5
        if task_traits(task).generates:
            labels = 0.0 if self.losses.logits or self.losses.reverse_kl else 1.0
        elif self.train_on != "labeled" and self.losses.uses_teacher():  # the other samples have no labels
            labels = 0.0
        weights = {"logits": self.losses.logits, "labels": labels}
        return self.model_copy(update={"losses": self.losses.model_copy(update=weights)})

    @field_validator("student", mode="before")
    @classmethod
    def _convert_student(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_phases(self) -> Self:
        if self.phases is not None and "losses" in self.model_fields_set:
            raise SettingError(
                "with `phases` each phase has its own losses; remove `losses`",
                code="settings-conflict",
            )
        return self

    @model_validator(mode="after")
    def _check_mixed_labels(self) -> Self:
        if self.train_on == "both" and self.uses_labels() and len(self.all_teachers()) > 1:
            raise SettingError(
                "train_on: both with a loss on the labels supports one teacher; set losses.labels to 0,"
                " or remove the other teachers",
                code="settings-conflict",
            )
        return self

    @model_validator(mode="after")
    def _check_compiled(self) -> Self:
        inner = [name for training in self.phase_settings() for name in training.losses.inner_weights()]
        if self.torch_compile and inner:
            raise SettingError(
                f"torch_compile: the loss {inner[0]} reads tensors inside the models, which compiled forward"
                " passes do not keep; remove one of them",
                code="settings-conflict",
            )
        return self

    @model_validator(mode="after")
    def _check_saved_adapter(self) -> Self:
        changes = [name for name in ("phases", "student") if getattr(self, name) is not None]
        if self.lora is not None and self.lora.save_adapter and changes:
            raise SettingError(
                f"lora.save_adapter: with {changes[0]} the adapters are added to weights that are not stored;"
                " remove save_adapter",
                code="settings-conflict",
            )
        return self

    @model_validator(mode="after")
    def _check_cached_logits(self) -> Self:
        if self.packing and self.cache_logits is not None:
            raise SettingError(
                "cache_logits stores the teacher's outputs of single samples; remove packing or cache_logits",
                code="settings-conflict",
            )
        return self

    @field_validator("teacher", mode="before")
    @classmethod
    def _convert_teacher(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return (value,)
        return tuple(value) if isinstance(value, list) else value  # JSON has lists instead of tuples

    @model_validator(mode="after")
    def _check_teachers(self) -> Self:
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
    def _check_inner_losses(self) -> Self:
        inner = {name for training in self.phase_settings() for name in training.losses.inner_weights()}
        if self.layer_map != "uniform" and not inner:
            raise SettingError(
                f"layer_map has no effect without one of the losses {', '.join(INNER_LOSSES)}",
                code="unused-setting",
            )
        if module_pairs(self.layer_map) and inner - {"hidden_states"}:
            unknown = ", ".join(sorted(inner - {"hidden_states"}))
            raise SettingError(
                f"layer_map: of named modules only hidden_states are compared; remove the loss {unknown}",
                code="settings-conflict",
            )
        if self.layer_reduction != "sum" and not inner & {"hidden_states", "attention"}:
            raise SettingError(
                "layer_reduction has no effect without the loss hidden_states or attention",
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
        teacher_only = (w.logits or w.reverse_kl) and w.labels == 0 and not w.inner_weights()
        return self.model_copy(update={"dropout": 0.0}) if teacher_only and self.dropout is None else self

    def needs_only_outputs(self, task: Task) -> bool:
        """Return whether this training uses the teacher's outputs only, no inner states."""
        w, vectors = self.losses, self.losses.vector_weights()
        uses_outputs = (
            vectors["sentence_embedding"] or vectors["pairwise_similarity"]
            if task_traits(task).embeds
            else w.logits or w.reverse_kl or w.outputs
        )
        return bool(uses_outputs) and not w.inner_weights()

    def uses_labels(self) -> bool:
        """Return whether a classifier also learns from the labels of its samples, in any of the trainings."""
        default = 1.0 if self.train_on == "labeled" else 0.0
        weights = [training.losses.labels for training in self.phase_settings()]
        return any(default if weight is None else weight for weight in weights)

    def phase_settings(self) -> list[DistillSettings]:
        """Return the settings of each training, in order: one per phase, or those of the step."""
        if self.phases is None:
            return [self]
        trainings = []
        for number, phase in enumerate(self.phases, 1):
            overrides = phase.model_dump(exclude={"losses"}, exclude_none=True)
            # a metric on outputs is meaningless while inner states are being fitted; gradual sparsity and
            # masks run in one phase only
            is_last = number == len(self.phases)
            defaults = (
                {}
                if is_last
                else {"metric_for_best_model": LOSS_METRIC, "sparsify": None, "learned_masks": None}
            )
            trainings.append(
                self.model_copy(update={**defaults, **overrides, "losses": phase.losses, "phases": None})
            )
        return trainings
