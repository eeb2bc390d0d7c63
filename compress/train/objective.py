"""What a model is judged by on batches: the loss with the labels, and means of a loss.

Apart from the loop: stages that measure and do not train do without transformers' Trainer, whose import
takes seconds (it brings peft along).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.train.data import TensorBatch, inputs_of
from smelt.compress.train.losses.of_classes import training_loss
from smelt.compress.train.losses.of_sentences import order_loss, vectors_of
from smelt.compress.train.state import autocast
from smelt.compress.train.terms import OVER, Objective, Over, counts_of, terms_of, values_of
from smelt.runtime.models.sentence_model import is_sentence_model


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return float [B, T, V] for a translator or language model, [B, C] for a classifier.

    `labels` are not fed.
    """
    inputs = inputs_of(batch)
    labels = batch["labels"]  # int64 [B, L] where texts come out, and then a cache could be asked for
    if labels.dim() == 2 and not labels.is_floating_point():
        logits: Tensor = model(**inputs, use_cache=False).logits
    else:
        logits = model(**inputs).logits
    return logits


def label_objective(smoothing: float = 0.0) -> Callable[[nn.Module, Mapping[str, Tensor]], Tensor]:
    """Return the mean loss with the labels (see `training_loss`), smoothed only while the model trains.

    Of a sentence embedder it is `order_loss` with the scores.
    """

    def objective(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        plain: Any = getattr(model, "module", model)
        if is_sentence_model(plain):
            return order_loss(vectors_of(model, batch), batch["labels"])
        return training_loss(
            plain.config,
            logits_of(model, batch),
            batch["labels"],
            smoothing=smoothing if model.training else 0.0,
        )

    return objective


def mean_loss(
    model: Any, batches: Sequence[TensorBatch], objective: Objective, precision: str, device: torch.device
) -> float:
    """Return the objective's mean over all items of `batches`, in eval mode, without gradients."""
    sums: dict[str, float] = {}
    counts: dict[Over, int] = dict.fromkeys(OVER, 0)
    kinds: dict[str, Over] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad(), autocast(precision, device):
        for batch in batches:
            there = {name: value.to(device) for name, value in batch.items()}
            items = counts_of(batch)
            for over in OVER:
                counts[over] += items[over]
            for name, (mean, over) in values_of(terms_of(objective(model, there))).items():
                sums[name] = sums.get(name, 0.0) + mean * items[over]
                kinds[name] = over
    model.train(was_training)
    return sum(total / max(1, counts[kinds[name]]) for name, total in sums.items())
