"""Which learning rate a training takes where nobody says one: by family, width, and what trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from smelt.compress.train.settings import TrainingSettings
from smelt.core.artifact import Artifact
from smelt.core.files import read_json
from smelt.core.stage import Context
from smelt.families.registry import find_family

What = Literal["weights", "adapters", "few bits", "fewer layers"]
# Of a family that smelt does not know.
_UNKNOWN = 5e-5
# How many times as fast as all weights of a whole model, and the most that is taken. Adapters: Schulman et
# al. 2025, LoRA Without Regret, and Hu et al. 2021 (2e-4 for GPT-3, 4e-4 for RoBERTa). Through codes of fewer
# than four bits a weight has to cross to another code; where layers are gone, those that are left of a model
# that writes fit less well together than those of an encoder, which learns best as fast as a whole one
# (docs/measurements/rates.md).
_TIMES: dict[What, tuple[float, float]] = {
    "weights": (1.0, 1e-3), "adapters": (10.0, 4e-4), "few bits": (10.0, 1e-3), "fewer layers": (10.0, 1e-3),
}  # fmt: skip


def learning_rate_of(config: Mapping[str, Any], what: What = "weights") -> float:
    """Return the highest learning rate of AdamW for the training of a model.

    What is published for the family counts for the width that it was published for: the rate of an adaptive
    optimizer goes with 1 / width (Yang et al. 2022, Tensor Programs V, arXiv:2203.03466, table 3).

    Args:
        config: the Hugging Face config of the model, as a dict.
        what: trains: all weights of a model that was trained before, low-rank adapters beside them, weights
            behind codes of fewer than four bits, or all weights of a model that lost layers.
    """
    family = find_family(config)
    rate = _UNKNOWN
    if family is not None:
        rate, published, width = family.rate.highest, family.rate.width, config.get(family.width)
        if published is not None and isinstance(width, int) and width > 0:
            rate *= published / width
    if what == "fewer layers" and (family is None or family.kind == "encoder"):
        what = "weights"
    times, highest = _TIMES[what]
    plain = min(rate, _TIMES["weights"][1])
    return max(plain, min(highest, times * rate))


def lost_layers(config: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Return whether a model has fewer layers than the one that it was made of, by their configs."""
    family = find_family(config)
    if family is None or family.name != whole.get("model_type") or family.stacks is None:
        return False
    counts = {stack.name: stack.count(config) or 0 for stack in family.stacks(config)}
    return any(counts.get(stack.name, 0) < (stack.count(whole) or 0) for stack in family.stacks(whole))


def with_rate(settings: TrainingSettings, model: Any, src: Artifact | None, ctx: Context) -> TrainingSettings:
    """Return the settings with the learning rate that `model` takes, where nobody said one; tell the log.

    Layers count as lost that the untouched model of the recipe has, whichever step took them. src: what the
    step goes on from.
    """
    from smelt.compress.quantize.through_codes import trains_few_bits

    if settings.learning_rate is not None:
        return settings
    what: What = "weights"
    if settings.lora is not None:
        what = "adapters"
    elif trains_few_bits(model):
        what = "few bits"
    elif not settings.begins_anew and lost_layers(model.config.to_dict(), _whole(src, ctx)):
        what = "fewer layers"
    rate = learning_rate_of(model.config.to_dict(), what)
    page = "docs/reference/stages/finetune.md#learning-rates"
    ctx.say(f"learning rate {rate:.2g}, for {what} of such a model ({page})")
    return settings.model_copy(update={"learning_rate": rate})


def _whole(src: Artifact | None, ctx: Context) -> Mapping[str, Any]:
    """Return the config of the untouched model; empty behind a student that is another model."""
    by_key = {artifact.key: artifact for artifact in ctx.ancestors.values()}
    while src is not None:
        if (src.manifest.settings.get("student") or {}).get("model"):
            return {}
        src = by_key.get(src.manifest.parent or "")
    root = ctx.ancestors.get("model")
    return {} if root is None else read_json(root.path / "config.json")
