"""Which learning rate a training takes where nobody says one: by family, width, and what trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from smelt.compress.train.settings import TrainingSettings
from smelt.families.registry import find_family

What = Literal["weights", "adapters", "few bits", "student"]
# Of a family that smelt does not know.
_UNKNOWN = 5e-5
# How many times as fast as all weights of a whole model. Adapters: Schulman et al. 2025, LoRA Without Regret,
# and Hu et al. 2021 (2e-4 for GPT-3, 4e-4 for RoBERTa); through codes of fewer than four bits, where a weight
# has to cross to another code, and students, whose layers are gone or new: docs/measurements/rates.md.
_TIMES: dict[What, float] = {"weights": 1.0, "adapters": 10.0, "few bits": 10.0, "student": 10.0}
# Beyond which nothing was gained (docs/measurements/rates.md).
_HIGHEST = 1e-3


def learning_rate_of(config: Mapping[str, Any], what: What = "weights") -> float:
    """Return the highest learning rate of AdamW for the training of a model.

    What is published for the family counts for the width that it was published for: the rate of an adaptive
    optimizer goes with 1 / width (Yang et al. 2022, Tensor Programs V, arXiv:2203.03466, table 3).

    Args:
        config: the Hugging Face config of the model, as a dict.
        what: trains: all weights of a model that was trained before, low-rank adapters beside them, weights
            behind codes of fewer than four bits, or a student.
    """
    family = find_family(config)
    rate = _UNKNOWN
    if family is not None:
        rate, published, width = family.rate.highest, family.rate.width, config.get(family.width)
        if published is not None and isinstance(width, int) and width > 0:
            rate *= published / width
    return min(_HIGHEST, _TIMES[what] * rate)


def with_rate(settings: TrainingSettings, model: Any) -> TrainingSettings:
    """Return the settings with the learning rate that `model` takes, where nobody said one."""
    from smelt.compress.quantize.through_codes import trains_few_bits

    if settings.learning_rate is not None:
        return settings
    what: What = "weights"
    if settings.lora is not None:
        what = "adapters"
    elif trains_few_bits(model):
        what = "few bits"
    elif getattr(settings, "student", None) is not None:
        what = "student"
    return settings.model_copy(update={"learning_rate": learning_rate_of(model.config.to_dict(), what)})
