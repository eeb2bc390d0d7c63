"""The stage `finetune`: training on labels, without a teacher."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from smelt.compress.training_techniques import (
    TechniqueTrainingSettings,
    check_training,
    estimate_training,
    invalidated_by_training,
    provided_by_training,
    train_with_techniques,
    training_task_errors,
)
from smelt.core.artifact import Artifact, Format
from smelt.core.messages import Message
from smelt.core.stage import Context, Need
from smelt.data.splits import TASKS, Split, Task, missing_scores_errors
from smelt.models.costs import CostInputs, StepCost
from smelt.training.costs import lighter_trainings
from smelt.training.settings import TrainingSettings, needed_by_training


class FinetuneSettings(TechniqueTrainingSettings):
    """Settings of `finetune`."""


class Finetune:
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
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "validation"})
    source: ClassVar[str] = (
        "Devlin et al. 2019, BERT, arXiv:1810.04805; loop: transformers.Trainer;"
        " scored pairs: CoSENT, Huang et al. 2024, IEEE/ACM TASLP 32;"
        " scales: LSQ, Esser et al. 2020, arXiv:1902.08153;"
        " weight_splitting: BinaryBERT, Bai et al. 2021, arXiv:2012.15701"
    )
    version: ClassVar[int] = 7
    settings_type: ClassVar[type[FinetuneSettings]] = FinetuneSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def provides(cls, settings: FinetuneSettings) -> frozenset[str]:
        """Return the properties of the result that later steps may destroy: the training."""
        return provided_by_training(settings)

    @classmethod
    def invalidates(cls, settings: FinetuneSettings) -> Mapping[str, str]:
        """Return the results of earlier steps that this step destroys: carefully chosen quantized weights."""
        return invalidated_by_training(settings)

    @classmethod
    def needs_with(cls, settings: FinetuneSettings, given: Collection[str]) -> frozenset[Need]:
        """Return the data that these settings need."""
        return needed_by_training(settings)

    @classmethod
    def check_model(
        cls, settings: FinetuneSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the settings that do not fit a model of this config, and the config of the result."""
        return check_training(settings, config), config

    @classmethod
    def check_rows(cls, settings: FinetuneSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return errors about the data: sentence embedders need scores, and keep their hidden width."""
        return missing_scores_errors(task, data, ("train", "validation")) + training_task_errors(
            settings, task
        )

    @classmethod
    def estimate_cost(cls, settings: FinetuneSettings, inputs: CostInputs) -> StepCost:
        """Return the estimated cost of the step."""
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
        train_with_techniques(model, src, settings, ctx, edits=edits, stage=self.name)
        save_trained(model, edits, src.path, settings.dtype, settings.qat, ctx)
