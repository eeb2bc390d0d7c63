"""Which layers a student can copy from a model, known from its config alone (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smelt.core.errors import nearest

# What each family's config calls the number of layers of a stack.
_SEQ2SEQ = {"encoder_layers": "encoder_layers", "decoder_layers": "decoder_layers"}
_STACK = {"layers": "num_hidden_layers"}
STACKS: dict[str, dict[str, str]] = {
    **{"marian": _SEQ2SEQ, "bart": _SEQ2SEQ, "mbart": _SEQ2SEQ},
    **{"bert": _STACK, "roberta": _STACK, "llama": _STACK, "qwen2": _STACK},
    "t5": {"encoder_layers": "num_layers", "decoder_layers": "num_decoder_layers"},
    "distilbert": {"layers": "n_layers"},
    "gpt2": {"layers": "n_layer"},
}


def check_student(student: Any, config: Mapping[str, Any]) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Compare the layers that `student` (a StudentSettings) keeps with those of a model.

    Args:
        student: the settings.
        config: the Hugging Face config of the model that the step gets, as a dict.

    Returns:
        (setting, what is wrong with it) for each mistake, and the config of the student.
    """
    kind, mistakes, after = str(config.get("model_type")), [], dict(config)
    known = STACKS.get(kind)
    for stack in ("encoder_layers", "decoder_layers", "layers") if known else ():
        choice = getattr(student, stack)
        if choice is None:
            continue
        assert known is not None
        if stack not in known:
            hint = nearest(stack, known)
            mistakes.append((stack, f"a {kind} model has no such stack; it has {', '.join(known)}.{hint}"))
            continue
        # t5 leaves its decoder's number out where it is the encoder's
        there = config.get(known[stack]) or config.get("num_layers")
        if not isinstance(there, int):
            continue
        if isinstance(choice, int):
            if choice > there:
                mistakes.append((stack, f"the student cannot keep {choice} layers of {there}."))
            after[known[stack]] = choice
        else:
            if sorted(set(choice)) != choice or not all(0 <= i < there for i in choice):
                mistakes.append((stack, f"expected rising numbers from 0 to {there - 1}, read {choice}."))
            after[known[stack]] = len(choice)
    return mistakes, after
