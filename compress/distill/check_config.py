"""Check from config.json alone which layers a student can copy and which losses apply (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.compress.distill.external_student import check_external_student, image_size_difference
from smelt.compress.distill.layer_map import check_layer_map
from smelt.compress.distill.settings import DistillSettings
from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import read_json_object
from smelt.core.labels import REGRESSION
from smelt.core.messages import Message, error_message
from smelt.core.text import with_article
from smelt.families.family import Family
from smelt.families.registry import find_family
from smelt.runtime.text.length_limits import position_limit

# Names of the layer stacks in settings; each family has one or two of them.
STACK_NAMES = ("encoder_layers", "decoder_layers", "layers")


def check_student(student: Any, config: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
    """Check the layers that `student` (a StudentSettings) keeps against those of a model.

    Args:
        student: the settings.
        config: the Hugging Face config of the model that the step gets, as a dict.

    Returns:
        The mistakes, each with its setting, and the config of the student.
    """
    if student.is_external:
        return check_external_student(student, config)
    family, after = find_family(config), dict(config)
    mistakes: list[Message] = []
    stacks = {stack.name: stack for stack in family.stacks(config)} if family else {}
    for name in STACK_NAMES if family else ():
        choice, stack = getattr(student, name), stacks.get(name)
        if choice is None:
            continue
        if stack is None:
            hint = did_you_mean(name, stacks)
            kind = config.get("model_type")
            mistakes.append(
                error_message(
                    "unknown-stack",
                    f"{with_article(kind)} model has no such stack; it has {', '.join(stacks)}.{hint}",
                    setting=name,
                )
            )
            continue
        there = stack.num_layers(config)
        if there is None:
            continue
        if isinstance(choice, int):
            if choice > there:
                text = f"the student cannot keep {choice} of {there} layers. Choose at most {there}."
                mistakes.append(error_message("more-than-model-has", text, setting=name))
            elif reason := _first_layer_error(family, choice, there, student.layer_selection):
                mistakes.append(error_message("first-layer-required", reason, setting=name))
            after[stack.num_layers_key] = choice
        else:
            if sorted(set(choice)) != choice or not all(0 <= i < there for i in choice):
                text = f"expected increasing layer indices from 0 to {there - 1}, got {choice}."
                mistakes.append(error_message("wrong-layer-numbers", text, setting=name))
            elif reason := _first_layer_error(family, choice, there, student.layer_selection):
                mistakes.append(error_message("first-layer-required", reason, setting=name))
            after[stack.num_layers_key] = len(choice)
    return mistakes, after


def check_losses(settings: DistillSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return the mistakes, each with its setting, of losses that a student with this config lacks."""
    family, found = find_family(config), check_layer_map(settings.layer_map, config, None)
    for number, training in enumerate(settings.phase_settings()):
        place = "losses" if settings.phases is None else f"phases.{number}.losses"
        inner = training.losses.inner_weights()
        if family is None and inner:
            kind = config.get("model_type")
            text = f"{', '.join(inner)} of a {kind} model are not supported. Remove these losses."
            found.append(error_message("unsupported-family", text, setting=place))
        stacks = family.stacks(config) if family else ()
        if "attention" in inner and not all(a.uses_attention_interface for s in stacks for a in s.attentions):
            text = no_attention_scores_error(str(config.get("model_type")))
            found.append(error_message("unreadable-attention", text, setting=f"{place}.attention"))
        if training.losses.reverse_kl and config.get("problem_type") == REGRESSION:
            found.append(
                error_message(
                    "problem-type-mismatch",
                    "a regression model has no distribution; use losses: {logits: 1.0} instead.",
                    setting=f"{place}.reverse_kl",
                )
            )
    return found


def check_teacher_folders(settings: DistillSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return the mistakes, each with its setting, of teacher folders that do not fit the model."""
    found: list[Message] = []
    for one in settings.all_teachers():
        own = {} if isinstance(one, str) else _read_config(Path(one.model))
        family = find_family(config)
        if family is None or find_family(own) is None:
            continue  # the plan reports what is wrong with the folder
        if sizes := image_size_difference(own, config):
            found.append(error_message("image-size-mismatch", sizes, setting="teacher"))
        room, most = position_limit(own), position_limit(config)
        cut = min(most, settings.max_length or most) if most is not None else settings.max_length
        if family.architecture != "decoder" and room is not None and cut is not None and room < cut:
            text = (
                f"the teacher has {room} positions, but samples have up to {cut} tokens; set"
                f" max_length: {room}."
            )
            found.append(error_message("longer-than-model", text, setting="teacher"))
    return found


def _read_config(folder: Path) -> Mapping[str, Any]:
    try:
        return read_json_object(folder / "config.json")
    except (InputError, OSError):
        return {}


def check_teacher(
    settings: DistillSettings, student: Mapping[str, Any], teacher: Mapping[str, Any]
) -> list[Message]:
    """Return the mistakes, each with its setting, where the losses cannot compare student and teacher.

    Args:
        settings: of the step.
        student: its Hugging Face config; its own layers have been checked already.
        teacher: the teacher's Hugging Face config.
    """
    wanted = [training.losses.inner_weights() for training in settings.phase_settings()]
    if not any(wanted):
        return []
    found = check_layer_map(settings.layer_map, student, teacher)
    ours, theirs = _hidden_size(student), _hidden_size(teacher)
    for number, inner in enumerate(wanted):
        if "cosine" in inner and ours and theirs and ours != theirs:
            place = "losses" if settings.phases is None else f"phases.{number}.losses"
            found.append(
                error_message("width-mismatch", cosine_width_error(ours, theirs), setting=f"{place}.cosine")
            )
    return found


def cosine_width_error(student: int, teacher: int) -> str:
    """Return the error text for the cosine loss of hidden states with different widths."""
    return (
        f"the teacher's hidden states have width {teacher}, the student's {student}; their cosine is not"
        " defined. Use losses: {hidden_states: 1.0} instead, which learns a projection."
    )


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    """Return the width of a model's hidden states, None if its config has none."""
    family = find_family(config)
    said = config.get(family.hidden_size_key) if family else None
    return said if isinstance(said, int) else None


def no_attention_scores_error(family_name: str) -> str:
    """Return the error text for a family whose attention scores cannot be captured."""
    return (
        f"attention scores of a {family_name} model cannot be captured; use self_attention_relations instead."
    )


def _first_layer_error(family: Family | None, choice: int | list[int], there: int, choose: str) -> str | None:
    """Return the error text if a student lacks the first layer and needs it, else None."""
    gone = choose == "last" and choice < there if isinstance(choice, int) else 0 not in choice
    if family is None or family.first_layer_reason is None or not gone:
        return None
    return f"{with_article(family.name)} student must keep the first layer: {family.first_layer_reason}."
