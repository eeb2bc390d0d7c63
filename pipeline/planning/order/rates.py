"""Which learning rates the trainings of a plan take that say none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smelt.compress.train.rates import What, learning_rate_of, lost_layers
from smelt.compress.train.settings import TrainingSettings
from smelt.core.messages import Message, info
from smelt.look.coded_model import CodedModel
from smelt.planning.plan import Step
from smelt.recipe.stages import ROOT
from smelt.runtime.schemes.registry import SCHEMES


def unsaid_rates(
    steps: Sequence[Step], config: Mapping[str, Any], coded: CodedModel | None
) -> Iterator[Message]:
    """Yield a note on the trainings that say no learning rate, with the one that each takes.

    Nothing where that is known when the step begins, and told by the log then: below a step that makes the
    model narrower, and of students that are another model.

    Args:
        steps: of the plan, parents first.
        config: of the untouched model; empty where it is not at hand.
        coded: the codes of the untouched model; None for floats.
    """
    told = []
    known: dict[str, tuple[str, ...]] = {ROOT: tuple(coded.schemes) if coded else ()} if config else {}
    configs = {ROOT: config}
    for step in steps:
        settings: Any = step.settings
        if step.parent not in known or settings.begins_anew:
            continue
        if "width" in getattr(settings, "targets", ()):
            continue
        codes, before = known[step.parent], configs[step.parent]
        known[step.name] = tuple(settings.schemes()) if step.stage == "quantize" else codes
        check = getattr(step.cls, "check_model", None)
        configs[step.name] = after = check(settings, before)[1] if check else before
        if isinstance(settings, TrainingSettings) and _says_none(settings):
            told.append(f"{step.name} {_rate(settings, after, codes, lost_layers(after, config))}")
    if told:
        yield info("default-learning-rate", f"default learning rates: {'; '.join(told)}")


def _says_none(settings: Any) -> bool:
    """Return whether a training, or one of its phases, has no learning rate of its own."""
    return any(one.learning_rate is None for one in getattr(settings, "trainings", lambda: [settings])())


def _rate(settings: Any, config: Mapping[str, Any], codes: tuple[str, ...], lost: bool) -> str:
    """Return the rates of one training, with what they are for. lost: whether layers are gone."""
    what: What = "weights"
    if settings.lora is not None:
        what = "adapters"
    elif lost:
        what = "fewer layers"
    told = f"{learning_rate_of(config, what):.2g}"
    few = [name for name in codes if SCHEMES[name].trained or 0 < SCHEMES[name].bits < 4]
    if what == "adapters" or not few:
        return f"{told} ({what})"
    through = f"{learning_rate_of(config, 'few bits'):.2g}"
    if len(few) == len(codes):
        return f"{through} (few bits)"
    return f"{through} if most of its weights have fewer than four bits, else {told}"
