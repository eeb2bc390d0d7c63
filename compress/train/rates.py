"""Which learning rate a training takes where nobody says one: by family, width, and what trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from smelt.compress.train.settings import TrainingSettings
from smelt.families.registry import find_family

What = Literal["weights", "adapters", "few bits", "student"]
# Of a family that smelt does not know.
_UNKNOWN = 5e-5
# How many times as fast as all weights of a whole model, and the most that is taken. Adapters: Schulman et
# al. 2025, LoRA Without Regret, and Hu et al. 2021 (2e-4 for GPT-3, 4e-4 for RoBERTa). Through codes of fewer
# than four bits a weight has to cross to another code; the layers of a student that writes fit less well
# together than those of an encoder, which learns best as fast as a whole one (docs/measurements/rates.md).
_TIMES: dict[What, tuple[float, float]] = {
    "weights": (1.0, 1e-3), "adapters": (10.0, 4e-4), "few bits": (10.0, 1e-3), "student": (10.0, 1e-3),
}  # fmt: skip


def learning_rate_of(config: Mapping[str, Any], what: What = "weights") -> float:
    """Return the highest learning rate of AdamW for the training of a model.

    What is published for the family counts for the width that it was published for: the rate of an adaptive
    optimizer goes with 1 / width (Yang et al. 2022, Tensor Programs V, arXiv:2203.03466, table 3).

    Args:
        config: the Hugging Face config of the model, as a dict.
        what: trains: all weights of a model that was trained before, low-rank adapters beside them, weights
            behind codes of fewer than four bits, or a student whose layers are gone or new.
    """
    family = find_family(config)
    rate = _UNKNOWN
    if family is not None:
        rate, published, width = family.rate.highest, family.rate.width, config.get(family.width)
        if published is not None and isinstance(width, int) and width > 0:
            rate *= published / width
    if what == "student" and (family is None or family.kind == "encoder"):
        what = "weights"
    times, highest = _TIMES[what]
    plain = min(rate, _TIMES["weights"][1])
    return max(plain, min(highest, times * rate))


def with_rate(settings: TrainingSettings, model: Any, say: Callable[[str], None]) -> TrainingSettings:
    """Return the settings with the learning rate that `model` takes, where nobody said one; tell the log."""
    from smelt.compress.quantize.through_codes import trains_few_bits

    if settings.learning_rate is not None:
        return settings
    what: What = "weights"
    if settings.lora is not None:
        what = "adapters"
    elif trains_few_bits(model):
        what = "few bits"
    elif (student := getattr(settings, "student", None)) is not None and student.model is None:
        what = "student"
    rate = learning_rate_of(model.config.to_dict(), what)
    say(f"learning rate {rate:.2g}, for {what} of such a model (docs/finetune.md#learning-rates)")
    return settings.model_copy(update={"learning_rate": rate})
