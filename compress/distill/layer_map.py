"""Which of a teacher's hidden states a student's are compared with; known from two numbers of layers.

Hidden states are counted as transformers does: 0 are the embeddings, n is what the n-th block gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from smelt.core.messages import Message, mistake
from smelt.families.registry import find_family

StackName = Literal["encoder_layers", "decoder_layers", "layers"]
StackMap: TypeAlias = Literal["uniform", "last"] | dict[int, int]
LayerMap: TypeAlias = StackMap | dict[StackName, StackMap]


def of_stack(layer_map: LayerMap, stack: str) -> StackMap:
    """Return what `layer_map` says of one stack; uniform where it says nothing of it."""
    if isinstance(layer_map, str):
        return layer_map
    named: Any = layer_map
    if all(isinstance(key, int) for key in named):
        return dict(named)
    said: StackMap = named.get(stack, "uniform")
    return said


def resolve(said: StackMap, student: int, teacher: int) -> dict[int, int]:
    """Return student's state to teacher's, rising.

    uniform: n goes with n * N / M (rounded, halves up), which is the last block of each group, as in
    TinyBERT (arXiv:1909.10351), and the embeddings with the embeddings. last: only the last with the last.

    Args:
        said: of this stack.
        student: M, its blocks.
        teacher: N, its blocks.
    """
    if said == "last":
        return {student: teacher}
    if said == "uniform":
        return {n: (2 * n * teacher + student) // (2 * student) for n in range(student + 1)}
    return dict(sorted(said.items()))


def misfit(said: StackMap, student: int | None, teacher: int | None) -> str | None:
    """Return which states of a map do not exist, None where all do; a number that is not known fits."""
    if isinstance(said, str):
        return None
    for whose, numbers, there in (("student", said, student), ("teacher", said.values(), teacher)):
        if there is None:
            continue
        strange = sorted(n for n in numbers if not 0 <= n <= there)
        if strange:
            return (
                f"the {whose} has the states 0 (its embeddings) to {there} (its last layer), and the map says"
                f" {', '.join(map(str, strange))}."
            )
    return None


def check_map(
    layer_map: LayerMap, student: Mapping[str, Any], teacher: Mapping[str, Any] | None
) -> list[Message]:
    """Return what is wrong, with its setting, for states and stacks that do not exist.

    Args:
        layer_map: of the settings.
        student: the Hugging Face config of the student.
        teacher: that of the teacher, None where it is not known.
    """
    family = find_family(student)
    if family is None:
        return []
    found: list[Message] = []
    stacks = {stack.name: stack.count(student) for stack in family.stacks(student)}
    if isinstance(layer_map, dict):
        strange: list[str] = [key for key in layer_map if isinstance(key, str) and key not in stacks]
        for key in strange:
            text = f"a {family.name} model has {' and '.join(stacks)}."
            found.append(mistake("unknown-stack", text, setting=f"layer_map.{key}"))
    others = find_family(teacher) if teacher is not None else None
    theirs = {s.name: s.count(teacher) for s in others.stacks(teacher)} if others and teacher else {}
    for name, count in stacks.items():
        if wrong := misfit(of_stack(layer_map, name), count, theirs.get(name)):
            text = wrong if len(stacks) == 1 else f"{name}: {wrong}"
            found.append(mistake("unknown-layer", text, setting="layer_map"))
    return found
