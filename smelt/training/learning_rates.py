"""Default learning rates: by family, width, and what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from smelt.core.artifact import Artifact
from smelt.core.files import read_json_object
from smelt.core.stage import Context
from smelt.models.families.registry import find_family
from smelt.training.settings import TrainingSettings

TrainedPart = Literal["weights", "adapters", "few bits", "fewer layers"]
# For unsupported families.
_DEFAULT_LEARNING_RATE = 5e-5
# Factors relative to training all weights of a whole model, and the largest rates. Adapters: Schulman et
# al. 2025, LoRA Without Regret, and Hu et al. 2021 (2e-4 for GPT-3, 4e-4 for RoBERTa). With fewer than four
# bits a weight must change enough to reach another quantized value. The remaining layers of a generative
# model with removed layers match less well than those of an encoder, which learns best at the rate of a whole
# one (docs/measurements/rates.md).
_SCALE_AND_MAXIMUM: dict[TrainedPart, tuple[float, float]] = {
    "weights": (1.0, 1e-3), "adapters": (10.0, 4e-4), "few bits": (10.0, 1e-3), "fewer layers": (10.0, 1e-3),
}  # fmt: skip


def default_learning_rate(config: Mapping[str, Any], trained: TrainedPart = "weights") -> float:
    """Return the peak learning rate of AdamW for the training of a model.

    Published rates of a family apply to the published width: the rate of an adaptive optimizer scales
    with 1 / width (Yang et al. 2022, Tensor Programs V, arXiv:2203.03466, table 3).

    Args:
        config: the Hugging Face config of the model, as a dict.
        trained: what is trained: all weights of a trained model, low-rank adapters, weights of fewer than
            four bits, or all weights of a model with removed layers.
    """
    family = find_family(config)
    rate = _DEFAULT_LEARNING_RATE
    if family is not None:
        rate, published, width = (
            family.learning_rate.peak,
            family.learning_rate.hidden_size,
            config.get(family.hidden_size_key),
        )
        if published is not None and isinstance(width, int) and width > 0:
            rate *= published / width
    if trained == "fewer layers" and (family is None or family.architecture == "encoder"):
        trained = "weights"
    times, highest = _SCALE_AND_MAXIMUM[trained]
    plain = min(rate, _SCALE_AND_MAXIMUM["weights"][1])
    return max(plain, min(highest, times * rate))


def has_fewer_layers(config: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Return whether a model has fewer layers than the original one, by their configs."""
    family = find_family(config)
    if family is None or family.name != whole.get("model_type") or family.stacks is None:
        return False
    counts = {stack.name: stack.num_layers(config) or 0 for stack in family.stacks(config)}
    return any(counts.get(stack.name, 0) < (stack.num_layers(whole) or 0) for stack in family.stacks(whole))


def is_mostly_low_bit(model: Any) -> bool:
    """Return whether most fake-quantized weights have fewer than four bits.

    A matrix that several layers share counts once.
    """
    from smelt.quantization.layers import MasterWeightLayer

    matrices = {
        id(m.quantized.matrix): m.quantized.matrix
        for m in model.modules()
        if isinstance(m, MasterWeightLayer)
    }
    weights = [(matrix.scheme, len(matrix.codes) * matrix.width) for matrix in matrices.values()]
    few = sum(count for scheme, count in weights if scheme.requires_training or 0 < scheme.bits < 4)
    return 2 * few > sum(count for _, count in weights)


def with_learning_rate(
    settings: TrainingSettings, model: Any, src: Artifact | None, ctx: Context
) -> TrainingSettings:
    """Return the settings with the default learning rate of `model` if none is set; log it.

    Layers are compared with the original model of the recipe, whichever step removed them. src: the step's
    input.
    """
    if settings.learning_rate is not None:
        return settings
    what: TrainedPart = "weights"
    if settings.lora is not None:
        what = "adapters"
    elif is_mostly_low_bit(model):
        what = "few bits"
    elif not settings.replaces_model and has_fewer_layers(
        model.config.to_dict(), _untouched_config(src, ctx)
    ):
        what = "fewer layers"
    rate = default_learning_rate(model.config.to_dict(), what)
    page = "docs/reference/stages/finetune.md#learning-rates"
    ctx.log(f"learning rate {rate:.2g}, for {what} of such a model ({page})")
    return settings.model_copy(update={"learning_rate": rate})


def _untouched_config(src: Artifact | None, ctx: Context) -> Mapping[str, Any]:
    """Return the config of the original model; empty if the student is a different model."""
    by_key = {artifact.key: artifact for artifact in ctx.ancestors.values()}
    while src is not None:
        if (src.manifest.settings.get("student") or {}).get("model"):
            return {}
        src = by_key.get(src.manifest.parent or "")
    root = ctx.ancestors.get("model")
    return {} if root is None else read_json_object(root.path / "config.json")
