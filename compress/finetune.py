"""Training on the labels alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from smelt.compress.train.run import masks_unfit, scores_lacking, train
from smelt.compress.train.settings import (
    TrainingSettings,
    check_training,
    left_by_training,
    lost_by_training,
    training_needs,
)
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Split, Task
from smelt.core.messages import Message
from smelt.core.stage import Context, Need


class FinetuneSettings(TrainingSettings):
    """Settings of `finetune`."""


class Finetune:
    """Train on the labels of the training rows; the structure stays as it is.

    Helps to fit a model to its task, to recover from pruning or factorization where no teacher is at
    hand, and as a control: the same training without any compression. After `quantize` it trains
    through the codes, which are decided again at the end; with `lora` beside them, and they stay. The
    checkpoint with the lowest loss on the validation rows is kept. A sentence embedder learns the order
    of the scores of pairs (CoSENT).

        - finetune: {epochs: 3, learning_rate: 5e-5, batch_size: 32}
        - finetune: {qat: {scales: lsq}}
        # binary inputs behind scheme binary, as BiT; no runtime here gains speed
        - finetune: {qat: {activations: one-bit}}
    """

    name: ClassVar[str] = "finetune"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "validation"})
    source: ClassVar[str] = (
        "Devlin et al. 2019, BERT, arXiv:1810.04805; loop: transformers.Trainer;"
        " scored pairs: CoSENT, Huang et al. 2024, IEEE/ACM TASLP 32;"
        " scales: LSQ, Esser et al. 2020, arXiv:1902.08153;"
        " split: BinaryBERT, Bai et al. 2021, arXiv:2012.15701;"
        " activations: BiT, Liu et al. 2022, arXiv:2205.13016"
    )
    version: ClassVar[int] = 7
    settings_type: ClassVar[type[FinetuneSettings]] = FinetuneSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def leaves(cls, settings: FinetuneSettings) -> frozenset[str]:
        """Return what later steps may lose: what was learned."""
        return left_by_training(settings)

    @classmethod
    def spoils(cls, settings: FinetuneSettings) -> Mapping[str, str]:
        """Return what is lost of the work of steps before it: codes that were chosen with care."""
        return lost_by_training(settings)

    @classmethod
    def needs_with(cls, settings: FinetuneSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs with these settings."""
        return training_needs(settings)

    @classmethod
    def check_model(
        cls, settings: FinetuneSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        return check_training(settings, config), config

    @classmethod
    def check_rows(cls, settings: FinetuneSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return what does not fit the rows: a sentence embedder learns from scores, and keeps its width."""
        return scores_lacking(task, data, ("train", "validation")) + masks_unfit(settings, task)

    def __call__(self, src: Artifact, settings: FinetuneSettings, ctx: Context) -> None:
        """Train the model of `src` and write it to `ctx.out`."""
        from smelt.compress.quantize.through_codes import load_trainable, save_trained
        from smelt.compress.quantize.training.binary_inputs import binarize_first
        from smelt.compress.quantize.training.splitting import split_first

        model, edits = load_trainable(src, ctx, settings.lora is not None)
        edits = split_first(model, edits, settings, ctx)
        binarize_first(model, edits, src, settings, ctx, self.name)
        train(model, src, settings, ctx, edits=edits, stage=self.name)
        save_trained(model, edits, src.path, settings, ctx)
