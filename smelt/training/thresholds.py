"""Set the thresholds of a trained multi-label classifier, or choose them on the validation samples by F1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from smelt.core.errors import InputError
from smelt.data.label_thresholds import CONFIG_KEY, choose_thresholds, complete_thresholds
from smelt.data.labels import MULTI_LABEL, class_names
from smelt.data.splits import Split
from smelt.stage import Context
from smelt.tasks.samples import collate, model_problem_type
from smelt.training.losses import model_inputs
from smelt.training.settings import TrainingSettings

if TYPE_CHECKING:
    from smelt.tasks.samples import EncodedSample


def set_label_thresholds(
    model: Any,
    settings: TrainingSettings,
    ctx: Context,
    encode: Callable[[Split], list[EncodedSample]],
) -> None:
    """Write the thresholds into the config of `model`, so that every later step has them, and report them.

    Args:
        model: on the CPU, in eval mode.
        settings: nothing is done without `label_thresholds`.
        ctx: its data, for thresholds that are chosen; receives the detail `label_thresholds`.
        encode: returns the samples of a split.

    Raises:
        InputError: the model is no multi-label classifier, there are no validation samples to choose by, or
            a threshold is of no label.
    """
    value = settings.label_thresholds
    if value is None:
        return
    names = class_names({"id2label": model.config.id2label})
    if model_problem_type(model.config) != MULTI_LABEL:
        raise InputError(
            f"{CONFIG_KEY}: only labels of {MULTI_LABEL} have thresholds. Remove it.",
            code="does-not-fit-model",
            setting=CONFIG_KEY,
        )
    if not isinstance(value, str):
        thresholds: Mapping[str, float] = dict(
            zip(names, complete_thresholds(value, names, "recipe"), strict=True)
        )
    elif split := ctx.data.get("validation"):
        samples = encode(split)
        gold = np.array([sample.target for sample in samples]) > 0
        logits = _logits(model, samples, settings.batch_size)
        thresholds = choose_thresholds(logits, gold, names, is_shared=value == "shared")
    else:
        raise InputError(
            f"{CONFIG_KEY}: {value} requires validation samples. Add data: {{validation: FILE}}.",
            code="missing-data",
            setting="data.validation",
        )
    setattr(model.config, CONFIG_KEY, dict(thresholds))
    ctx.details[CONFIG_KEY] = {name: round(threshold, 6) for name, threshold in thresholds.items()}


def _logits(
    model: Any, samples: list[EncodedSample], batch_size: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the logits of samples: float32 [n, C]."""
    logits = []
    with torch.inference_mode():
        for start in range(0, len(samples), batch_size):
            batch = collate(samples[start : start + batch_size], model.config)
            logits.append(model(**model_inputs(batch)).logits.float().numpy())
    return np.concatenate(logits)
