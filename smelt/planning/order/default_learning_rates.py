"""Report the default learning rates of the training steps in a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smelt.compress.train.learning_rates import TrainedPart, default_learning_rate, has_fewer_layers
from smelt.compress.train.settings import TrainingSettings
from smelt.core.messages import Message, info
from smelt.inspect.quantized_model import QuantizedModelInfo
from smelt.planning.plan import PlanStep
from smelt.recipe.stages import MODEL_STEP
from smelt.runtime.schemes.registry import SCHEMES


def default_rate_notes(
    steps: Sequence[PlanStep], config: Mapping[str, Any], quantization: QuantizedModelInfo | None
) -> Iterator[Message]:
    """Yield a note with the default learning rates of the training steps that do not set one.

    Steps after a stage that changes the model's width, and students that are another model, are not included:
    their rate is known when the step starts, and is in its log.

    Args:
        steps: steps of the plan, parents first.
        config: config of the original model; empty if not available.
        quantization: quantized weights of the original model; None for floats.
    """
    told = []
    known: dict[str, tuple[str, ...]] = (
        {MODEL_STEP: tuple(quantization.schemes) if quantization else ()} if config else {}
    )
    configs = {MODEL_STEP: config}
    for step in steps:
        settings: Any = step.settings
        if step.parent not in known or settings.replaces_model:
            continue
        if "width" in getattr(settings, "targets", ()):
            continue
        codes, before = known[step.parent], configs[step.parent]
        known[step.name] = tuple(settings.used_schemes()) if step.stage == "quantize" else codes
        check = getattr(step.stage_class, "check_model", None)
        configs[step.name] = after = check(settings, before)[1] if check else before
        if isinstance(settings, TrainingSettings) and _has_default_rate(settings):
            told.append(f"{step.name} {_rate_text(settings, after, codes, has_fewer_layers(after, config))}")
    if told:
        yield info("default-learning-rate", f"default learning rates: {'; '.join(told)}")


def _has_default_rate(settings: Any) -> bool:
    """Return whether a training, or one of its phases, has no learning rate of its own."""
    return any(one.learning_rate is None for one in getattr(settings, "phase_settings", lambda: [settings])())


def _rate_text(settings: Any, config: Mapping[str, Any], codes: tuple[str, ...], lost: bool) -> str:
    """Return the default rates of one training as text. lost: whether layers were removed."""
    what: TrainedPart = "weights"
    if settings.lora is not None:
        what = "adapters"
    elif lost:
        what = "fewer layers"
    told = f"{default_learning_rate(config, what):.2g}"
    few = [name for name in codes if SCHEMES[name].requires_training or 0 < SCHEMES[name].bits < 4]
    if what == "adapters" or not few:
        return f"{told} ({what})"
    through = f"{default_learning_rate(config, 'few bits'):.2g}"
    if len(few) == len(codes):
        return f"{through} (few bits)"
    return f"{through} if most weights have fewer than four bits, else {told}"
