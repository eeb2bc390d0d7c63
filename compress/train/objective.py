"""The objective of a model on batches: the loss with the labels, and means of a loss.

Separate from the loop: stages that measure without training do not import transformers' Trainer, which
takes seconds (it imports peft).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.train.encoded_samples import TensorBatch, model_inputs
from smelt.compress.train.loss_terms import (
    AVERAGED_OVER,
    AveragedOver,
    Objective,
    as_loss_terms,
    count_batch_items,
    term_values,
)
from smelt.compress.train.losses.classification import classification_loss
from smelt.compress.train.losses.sentence_vectors import batch_sentence_vectors, cosent_loss
from smelt.compress.train.training_state import autocast
from smelt.runtime.models.sentence_model import is_sentence_model


def model_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the logits: float [B, T, V] for a generating model, [B, C] for a classifier.

    `labels` are not passed to the model.
    """
    inputs = model_inputs(batch)
    labels = batch["labels"]  # int64 [B, L] for generating models, which could return a cache
    if labels.dim() == 2 and not labels.is_floating_point():
        logits: Tensor = model(**inputs, use_cache=False).logits
    else:
        logits = model(**inputs).logits
    return logits


def label_objective(smoothing: float = 0.0) -> Callable[[nn.Module, Mapping[str, Tensor]], Tensor]:
    """Return the function for the mean loss with the labels, smoothed only in training mode.

    See `classification_loss`; for a sentence embedder it is `cosent_loss` with the scores.
    """

    def objective(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        plain: Any = getattr(model, "module", model)
        if is_sentence_model(plain):
            return cosent_loss(batch_sentence_vectors(model, batch), batch["labels"])
        return classification_loss(
            plain.config,
            model_logits(model, batch),
            batch["labels"],
            smoothing=smoothing if model.training else 0.0,
        )

    return objective


def mean_loss(
    model: Any, batches: Sequence[TensorBatch], objective: Objective, precision: str, device: torch.device
) -> float:
    """Return the objective's mean over all items of `batches`, in eval mode, without gradients."""
    sums: dict[str, float] = {}
    counts: dict[AveragedOver, int] = dict.fromkeys(AVERAGED_OVER, 0)
    kinds: dict[str, AveragedOver] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad(), autocast(precision, device):
        for batch in batches:
            there = {name: value.to(device) for name, value in batch.items()}
            items = count_batch_items(batch)
            for over in AVERAGED_OVER:
                counts[over] += items[over]
            for name, (mean, over) in term_values(as_loss_terms(objective(model, there))).items():
                sums[name] = sums.get(name, 0.0) + mean * items[over]
                kinds[name] = over
    model.train(was_training)
    return sum(total / max(1, counts[kinds[name]]) for name, total in sums.items())
