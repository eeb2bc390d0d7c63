"""What a student can copy from a model and be compared in, known from its config alone (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.compress.distill.layer_map import check_map
from smelt.compress.distill.other_student import check_other, other_images
from smelt.compress.distill.settings import DistillSettings
from smelt.core.errors import InputError, nearest
from smelt.core.files import read_json
from smelt.core.labels import REGRESSION
from smelt.core.messages import Message, mistake
from smelt.core.text import article
from smelt.families.family import Family
from smelt.families.registry import find_family
from smelt.runtime.text.limits import position_limit

# What settings call the stacks of layers, of which each family has one or two.
STACKS = ("encoder_layers", "decoder_layers", "layers")


def check_student(student: Any, config: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
    """Compare the layers that `student` (a StudentSettings) keeps with those of a model.

    Args:
        student: the settings.
        config: the Hugging Face config of the model that the step gets, as a dict.

    Returns:
        Each mistake with its setting, and the config of the student.
    """
    if student.other:
        return check_other(student, config)
    family, after = find_family(config), dict(config)
    mistakes: list[Message] = []
    stacks = {stack.name: stack for stack in family.stacks(config)} if family else {}
    for name in STACKS if family else ():
        choice, stack = getattr(student, name), stacks.get(name)
        if choice is None:
            continue
        if stack is None:
            hint = nearest(name, stacks)
            kind = config.get("model_type")
            mistakes.append(
                mistake(
                    "unknown-stack",
                    f"{article(kind)} model has no such stack; it has {', '.join(stacks)}.{hint}",
                    setting=name,
                )
            )
            continue
        there = stack.count(config)
        if there is None:
            continue
        if isinstance(choice, int):
            if choice > there:
                text = f"the student cannot keep {choice} layers of {there}."
                mistakes.append(mistake("more-than-model-has", text, setting=name))
            elif reason := _first_missing(family, choice, there, student.layer_selection):
                mistakes.append(mistake("first-layer-required", reason, setting=name))
            after[stack.setting] = choice
        else:
            if sorted(set(choice)) != choice or not all(0 <= i < there for i in choice):
                text = f"expected rising numbers from 0 to {there - 1}, read {choice}."
                mistakes.append(mistake("wrong-layer-numbers", text, setting=name))
            elif reason := _first_missing(family, choice, there, student.layer_selection):
                mistakes.append(mistake("first-layer-required", reason, setting=name))
            after[stack.setting] = len(choice)
    return mistakes, after


def check_losses(settings: DistillSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return what is wrong, with its setting, where a loss cannot be had of a student with this config."""
    family, found = find_family(config), check_map(settings.layer_map, config, None)
    for number, training in enumerate(settings.trainings()):
        place = "losses" if settings.phases is None else f"phases.{number}.losses"
        inner = training.losses.of_inner()
        if family is None and inner:
            kind = config.get("model_type")
            text = f"smelt does not know where a {kind} model has {', '.join(inner)}."
            found.append(mistake("unsupported-family", text, setting=place))
        stacks = family.stacks(config) if family else ()
        if "attention" in inner and not all(a.interface for s in stacks for a in s.attentions):
            text = no_scores(str(config.get("model_type")))
            found.append(mistake("unreadable-attention", text, setting=f"{place}.attention"))
        if training.losses.reverse_kl and config.get("problem_type") == REGRESSION:
            found.append(
                mistake(
                    "problem-type-mismatch",
                    "numbers have no divergence to turn round.",
                    setting=f"{place}.reverse_kl",
                )
            )
    return found


def check_folders(settings: DistillSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return what is wrong, with its setting, of teachers in folders that cannot read what the model does."""
    found: list[Message] = []
    for one in settings.teachers():
        own = {} if isinstance(one, str) else _config_in(Path(one.model))
        family = find_family(config)
        if family is None or find_family(own) is None:
            continue  # the plan says what is wrong with the folder
        if sizes := other_images(own, config):
            found.append(mistake("image-size-mismatch", sizes, setting="teacher"))
        room, most = position_limit(own), position_limit(config)
        cut = min(most, settings.max_length or most) if most is not None else settings.max_length
        if family.kind != "decoder" and room is not None and cut is not None and room < cut:
            text = f"it has {room} positions, texts have up to {cut} tokens; give max_length: {room}."
            found.append(mistake("longer-than-model", text, setting="teacher"))
    return found


def _config_in(folder: Path) -> Mapping[str, Any]:
    try:
        return read_json(folder / "config.json")
    except (InputError, OSError):
        return {}


def check_teacher(
    settings: DistillSettings, student: Mapping[str, Any], teacher: Mapping[str, Any]
) -> list[Message]:
    """Return what is wrong, with its setting, where these two cannot be compared in what the losses look at.

    Args:
        settings: of the step.
        student: its Hugging Face config; its own layers were checked before.
        teacher: that of the teacher.
    """
    wanted = [training.losses.of_inner() for training in settings.trainings()]
    if not any(wanted):
        return []
    found = check_map(settings.layer_map, student, teacher)
    ours, theirs = _width(student), _width(teacher)
    for number, inner in enumerate(wanted):
        if "cosine" in inner and ours and theirs and ours != theirs:
            place = "losses" if settings.phases is None else f"phases.{number}.losses"
            found.append(mistake("width-mismatch", no_angle(ours, theirs), setting=f"{place}.cosine"))
    return found


def no_angle(student: int, teacher: int) -> str:
    """Return the sentence that says that the states of two models of these widths have no angle."""
    return (
        f"the teacher's hidden states have {teacher} numbers, the student's {student}; their angle is not"
        " defined. Take losses: {hidden_states: 1.0} instead, which learns a projection."
    )


def _width(config: Mapping[str, Any]) -> int | None:
    """Return how wide the hidden states of a model are, None where its config does not say."""
    family = find_family(config)
    said = config.get(family.width) if family else None
    return said if isinstance(said, int) else None


def no_scores(kind: str) -> str:
    """Return the sentence that says that the attention scores of a family cannot be read."""
    return f"a {kind} model makes its attention scores where they cannot be read; take relations instead."


def _first_missing(family: Family | None, choice: int | list[int], there: int, choose: str) -> str | None:
    """Say why a student cannot do without the first layer, where it would be without it."""
    gone = choose == "last" and choice < there if isinstance(choice, int) else 0 not in choice
    if family is None or family.first_stays is None or not gone:
        return None
    return f"{article(family.name)} student keeps the first layer: {family.first_stays}."
