"""The stage `finetune`: training on labels, without a teacher.

`distill` shares its training loop with the techniques that change a model in training. smelt/training knows
none of them: each is a `TrainingTechnique`, which `train_with_techniques` gives to the
loop. Imports no torch, so that the table of stages loads quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from smelt.compress.drop_layers.settings import check_part_kinds
from smelt.compress.model_input import COMPILED_QUANTIZED, codebook_error
from smelt.compress.prune.settings import LearnedMasksSettings, fixed_channel_errors, fixed_width_errors
from smelt.compress.quantize.qat_settings import QatSettings
from smelt.compress.sparsify.settings import GradualSparsitySettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, SettingError
from smelt.core.messages import Message, error_message
from smelt.data.label_thresholds import complete_thresholds
from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL, class_names, problem_type
from smelt.data.splits import Split, missing_labels_errors
from smelt.data.tasks import Task, task_names, task_traits
from smelt.models.families.limits import no_blocks_reason
from smelt.models.families.registry import find_family
from smelt.models.model_size import ModelSize, SizeInputs, StepSize
from smelt.stage import Context, Need, QuantizedInput, Stage
from smelt.training.settings import TrainingSettings, lighter_trainings, needed_by_training, training_size
from smelt.training.train import require_training_samples, train

if TYPE_CHECKING:
    from smelt.models.edits import Edit
    from smelt.training.extension import Objective, TrainingExtension, TrainingTechnique


# Stored weights of fewer bytes are quantized: float16 has two.
_HALF_BYTES = 1.5


class TechniqueTrainingSettings(TrainingSettings):
    """Settings of a training with techniques."""

    sparsify: GradualSparsitySettings | None = Field(
        default=None, description="set single weights to zero during training"
    )
    learned_masks: LearnedMasksSettings | None = Field(
        default=None,
        description="learn which units to remove",
    )
    qat: QatSettings | None = Field(default=None, description="quantization-aware training, after `quantize`")

    @property
    def needs_whole_parameters(self) -> tuple[str, ...]:
        """Learned masks and step sizes, which are read between updates."""
        masks = ("learned_masks",) if self.learned_masks is not None else ()
        return (*masks, "qat.scales: lsq") if self.qat is not None and self.qat.scales == "lsq" else masks

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.lora is not None and self.qat is not None:
            raise SettingError(
                "lora does not train the quantized weights, so qat has no effect; remove qat or lora",
                code="settings-conflict",
            )
        changing = [
            technique for technique in ("sparsify", "learned_masks") if getattr(self, technique) is not None
        ]
        if len(changing) + (self.lora is not None) > 1:
            raise SettingError(
                "set only one of lora, sparsify and learned_masks",
                code="settings-conflict",
            )
        replaced = [name for name in ("qat", "sparsify", "learned_masks") if getattr(self, name) is not None]
        if self.torch_compile and replaced:
            raise SettingError(
                f"{replaced[0]} changes layers between updates, which torch_compile would compile again each"
                " time; remove one of them",
                code="settings-conflict",
            )
        return self


def estimate_training(
    settings: TechniqueTrainingSettings,
    inputs: SizeInputs,
    *,
    teachers: Sequence[ModelSize] = (),
    samples: int | None = None,
) -> StepSize:
    """Return the estimated sizes of a training with its techniques (see `training_size`).

    A quantized model is trained through float weights, which each update rounds; sparsity and masks keep
    scores of the linear layers' weights.
    """
    is_quantized = inputs.source.bytes_per_weight < _HALF_BYTES
    copies = 2.0 * (is_quantized and settings.lora is None) + 2.0 * (settings.sparsify is not None)
    size = training_size(settings, inputs, teachers=teachers, samples=samples, layer_copies=copies)
    if not is_quantized or settings.lora is not None:
        return size
    has_master_weights = settings.qat is None or settings.qat.save_master_weights
    return replace(size, disk_bytes=size.disk_bytes + has_master_weights * inputs.result.float_bytes)


def provided_by_training(settings: TechniqueTrainingSettings) -> frozenset[str]:
    """Return what later steps may lose of a training, or cannot process."""
    masks = settings.learned_masks
    candidates = {
        "widths": masks and set(masks.targets) - {"width"},
        "parts": masks and masks.parts,
        "zeros": settings.sparsify,
    }
    return frozenset(
        {"training", *(property_name for property_name, provided in candidates.items() if provided)}
    )


def invalidated_by_training(settings: TechniqueTrainingSettings) -> Mapping[str, str]:
    """Return what a training loses of earlier steps."""
    if settings.lora is not None:  # next to quantized weights, which are not changed
        return {}
    units = {
        "pattern": "removed inputs shift their neighbors, and the n:m pattern of '{step}' is lost;"
        " remove units before '{step}'"
    }
    return (units if settings.learned_masks is not None and settings.learned_masks.targets else {}) | {
        "codes": "training updates float weights and rounds them at the end, so the weights that '{step}'"
        " calibrated are lost; train with lora, which does not change them, or remove method in"
        " '{step}'"
    }


def check_training(settings: TechniqueTrainingSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return the errors, each with its setting, of techniques that do not apply to a model.

    config: the Hugging Face config of the step's input model, as a dict.
    """
    family = find_family(config)
    if settings.packing and family is not None and not family.separates_packed_sequences:
        text = f"transformers' {family.name} has attention between packed samples; remove packing."
        return [error_message("does-not-fit-model", text, setting="packing")]
    if settings.sampling == "balanced" and (problem := problem_type(config)) != SINGLE_LABEL:
        text = f"samples with one class each can be drawn by class, but the model's are {problem}; remove it."
        return [error_message("does-not-fit-model", text, setting="sampling")]
    if settings.label_thresholds is not None and (message := _threshold_error(settings, config)):
        return [message]
    reason = no_blocks_reason(config)
    techniques = [
        technique
        for technique in ("lora", "sparsify", "learned_masks")
        if getattr(settings, technique) is not None
    ]
    if reason:
        return [
            error_message(
                "does-not-fit-model", f"{reason}; remove it to train all weights.", setting=technique
            )
            for technique in techniques
        ]
    masks, family = settings.learned_masks, find_family(config)
    routed = family is not None and any(stack.feed_forward.router for stack in family.stacks(config))
    if masks is not None and "ffn" in masks.parts and routed:
        text = "experts have no masks of whole parts. Set parts: [attention], or use drop-experts."
        return [error_message("does-not-fit-model", text, setting="learned_masks.parts")]
    return [
        *check_part_kinds(masks.parts if masks is not None else (), config, "learned_masks.parts"),
        *fixed_channel_errors(config, masks.targets if masks is not None else (), "learned_masks.targets"),
    ]


def _threshold_error(settings: TechniqueTrainingSettings, config: Mapping[str, Any]) -> Message | None:
    """Return the error of thresholds that a model cannot have."""
    if (problem := problem_type(config)) != MULTI_LABEL:
        text = f"only labels of {MULTI_LABEL} have thresholds, but the model's are {problem}; remove it."
        return error_message("does-not-fit-model", text, setting="label_thresholds")
    if isinstance(settings.label_thresholds, str):
        return None
    try:
        complete_thresholds(settings.label_thresholds, class_names(config), "recipe")
    except InputError as error:
        return error.as_message()
    return None


def training_task_errors(settings: TechniqueTrainingSettings, task: Task) -> list[Message]:
    """Return the errors.

    They are width masks where outputs are hidden states, packing of other than responses, and sampling by
    class without classes.
    """
    errors = []
    if settings.sampling == "balanced" and task_traits(task).output != "labels":
        text = f"only samples of {task_names(output='labels')} have one class each, not of {task}; remove it."
        errors.append(error_message("does-not-fit-task", text, setting="sampling"))
    if settings.packing and task_traits(task).samples != "prompts":
        text = f"only samples of {task_names(samples='prompts')} are packed, not of {task}; remove packing."
        errors.append(error_message("does-not-fit-task", text, setting="packing"))
    masks = settings.learned_masks
    return errors + fixed_width_errors(task, masks.targets if masks else (), "learned_masks.targets")


def train_with_techniques(
    model: Any,
    src: Artifact,
    settings: TechniqueTrainingSettings,
    ctx: Context,
    *,
    edits: list[Edit],
    stage: str,
    objective: Objective | None = None,
    extension: TrainingExtension | None = None,
    random: bool | None = None,
) -> None:
    """Train `model`, from `load_trainable`, in place with the techniques that are set; see `train`.

    Raises:
        InputError: as `train`; or width masks are set for a model whose outputs are hidden states; or
            torch_compile, where layers have quantized weights that are trained.
    """
    from smelt.compress.quantize.qat import qat_layers

    if settings.torch_compile and qat_layers(model):
        raise InputError(f"{stage}: {COMPILED_QUANTIZED}", code="settings-conflict", setting="torch_compile")
    for error in training_task_errors(settings, ctx.task):
        raise InputError(f"{stage}: {error.setting}: {error.message}", code=error.code, setting=error.setting)
    train(
        model,
        src,
        settings,
        ctx,
        objective=objective,
        edits=edits,
        stage=stage,
        extension=extension,
        techniques=_techniques(model, settings, edits, stage),
        random=random,
    )


def _techniques(
    model: Any, settings: TechniqueTrainingSettings, edits: list[Edit], stage: str
) -> list[Callable[[], TrainingTechnique]]:
    """Return what starts each technique; the quantized weights last, so that they are converted last."""
    from smelt.compress.quantize.qat import QuantizedWeights

    techniques: list[Callable[[], TrainingTechnique]] = []
    if settings.sparsify is not None:
        from smelt.compress.sparsify.gradual import GradualSparsifier

        techniques.append(partial(GradualSparsifier, model, settings.sparsify))
    if settings.learned_masks is not None:
        from smelt.compress.prune.learned_masks import LearnedMasks

        techniques.append(partial(LearnedMasks, model, settings.learned_masks, edits))
    if settings.qat is not None and settings.qat.scales == "lsq":
        from smelt.compress.quantize.qat_extensions import StepSizeTraining

        techniques.append(partial(StepSizeTraining, model, settings.qat, stage))
    return [*techniques, partial(QuantizedWeights, model)]


class FinetuneSettings(TechniqueTrainingSettings):
    """Settings of `finetune`."""

    class_weights: Literal["balanced"] | None = Field(
        default=None,
        description="classifiers: balanced multiplies the loss of a class by the inverse of its frequency",
    )

    @model_validator(mode="after")
    def _check_balance(self) -> Self:
        if self.class_weights is not None and self.sampling == "balanced":
            raise SettingError(
                "class_weights and sampling: balanced both make rare classes count more; remove one of them",
                code="settings-conflict",
            )
        return self


class Finetune(Stage[FinetuneSettings]):
    """Train on the labels of the training samples; keep the model's structure.

    Use it to fit a model to its task, to recover quality after pruning or factorization when there is
    no teacher, or as a control: the same training without compression. A quantized model is trained
    with quantization-aware training and quantized again at the end. With `lora`, the quantized weights
    stay fixed and only the adapters train. The checkpoint with the lowest validation loss is kept.
    Sentence embedders learn the order of the similarity scores (CoSENT).

        - finetune: {epochs: 3, learning_rate: 5e-5, batch_size: 32}
        - finetune: {qat: {scales: lsq}}
    """

    name: ClassVar[str] = "finetune"
    may_need: ClassVar[frozenset[Need]] = frozenset({"train", "validation"})
    source: ClassVar[str] = (
        "Devlin et al. 2019, BERT, arXiv:1810.04805; loop: transformers.Trainer;"
        " scored pairs: CoSENT, Huang et al. 2024, IEEE/ACM TASLP 32;"
        " scales: LSQ, Esser et al. 2020, arXiv:1902.08153;"
        " weight_splitting: BinaryBERT, Bai et al. 2021, arXiv:2012.15701"
    )
    version: ClassVar[int] = 8
    trains_weights: ClassVar[bool] = True
    settings_type: ClassVar[type[FinetuneSettings]] = FinetuneSettings

    @classmethod
    def provides(cls, settings: FinetuneSettings) -> frozenset[str]:
        """Return the properties of the result that later steps may destroy: the training."""
        return provided_by_training(settings)

    @classmethod
    def invalidates(cls, settings: FinetuneSettings) -> Mapping[str, str]:
        """Return the results of earlier steps that this step destroys: carefully chosen quantized weights."""
        return invalidated_by_training(settings)

    @classmethod
    def quantized_input_error(cls, settings: FinetuneSettings, quantized: QuantizedInput) -> str | None:
        """Return why the quantized weights cannot be trained, and what to do; None where they can."""
        text = codebook_error(quantized, cls.name)
        return (
            f"{text} Or train adapters: `- {cls.name}: {{lora: {{}}}}`."
            if text and settings.lora is None
            else None
        )

    @classmethod
    def needs_with(cls, settings: FinetuneSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data that these settings need."""
        return needed_by_training(settings)

    @classmethod
    def check_model(
        cls, settings: FinetuneSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the settings that do not fit a model of this config, and the config of the result."""
        errors = check_training(settings, config)
        if settings.class_weights is not None and problem_type(config) == REGRESSION:
            text = "a model with numbers as outputs (problem_type: regression) has no classes; remove it."
            errors.append(error_message("does-not-fit-model", text, setting="class_weights"))
        return errors, config

    @classmethod
    def check_rows(cls, settings: FinetuneSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return errors about the data: sentence embedders need scores, and keep their hidden width."""
        errors = missing_labels_errors(task, data, ("train", "validation"))
        errors += training_task_errors(settings, task)
        if task_traits(task).output == "arrays":
            text = f"the samples of {task} have no labels. Use distill, which learns a teacher's outputs."
            errors.append(error_message("does-not-fit-task", text))
        if settings.class_weights is not None and task_traits(task).output not in ("labels", "tags"):
            names = f"{task_names(output='labels')} and {task_names(output='tags')}"
            text = f"only samples of {names} have classes, not of {task}; remove it."
            errors.append(error_message("does-not-fit-task", text, setting="class_weights"))
        return errors

    @classmethod
    def estimate_size(cls, settings: FinetuneSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step."""
        return estimate_training(settings, inputs)

    @classmethod
    def lighter_settings(cls, settings: FinetuneSettings) -> Iterator[tuple[str, TrainingSettings]]:
        """Yield settings that need less memory, with their text."""
        return lighter_trainings(settings)

    def __call__(self, src: Artifact, settings: FinetuneSettings, ctx: Context) -> None:
        """Train the model of `src` and write it to `ctx.out`."""
        from smelt.compress.quantize.qat import load_trainable, save_trained
        from smelt.compress.quantize.qat_extensions import split_before_training

        model, edits = load_trainable(src, ctx, settings.lora is not None)
        edits = split_before_training(model, edits, settings.qat, ctx)
        objective = None if settings.class_weights is None else _balanced_objective(model, settings, ctx)
        train_with_techniques(model, src, settings, ctx, edits=edits, stage=self.name, objective=objective)
        save_trained(model, edits, src.path, settings.dtype, settings.qat, ctx)


def _balanced_objective(model: Any, settings: FinetuneSettings, ctx: Context) -> Objective:
    """Return the loss with the labels, in which the classes of the training samples count equally."""
    from smelt.tasks.samples import classifier_targets
    from smelt.training.losses import balanced_class_weights, label_objective

    require_training_samples(ctx, "finetune", labels=True)
    examples = ctx.data["train"].examples
    if ctx.traits.output == "tags":
        examples = tuple(
            replace(example, label=tag)
            for example in examples
            if isinstance(example.label, tuple)
            for tag in example.label
        )
    weights = balanced_class_weights(
        classifier_targets(examples, model.config, "train"), model.config.num_labels
    )
    names = class_names({"id2label": model.config.id2label})
    ctx.details["class_weights"] = {
        name: round(weight, 4) for name, weight in zip(names, weights.tolist(), strict=True)
    }
    return label_objective(settings.label_smoothing_factor, weights)
