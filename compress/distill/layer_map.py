"""The map from student layers to teacher layers, resolved from the two numbers of layers.

Hidden states are numbered as in transformers: 0 is the embedding output, n the output of block n.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from smelt.core.messages import Message, error_message
from smelt.families.registry import find_family

StackName = Literal["encoder_layers", "decoder_layers", "layers"]
StackMap: TypeAlias = Literal["uniform", "last"] | dict[int, int]
LayerMap: TypeAlias = StackMap | dict[StackName, StackMap]


def stack_map(layer_map: LayerMap, stack: str) -> StackMap:
    """Return the map of one stack; uniform if `layer_map` does not name it."""
    if isinstance(layer_map, str):
        return layer_map
    named: Any = layer_map
    if all(isinstance(key, int) for key in named):
        return dict(named)
    said: StackMap = named.get(stack, "uniform")
    return said


def resolve_layer_map(mapping: StackMap, student: int, teacher: int) -> dict[int, int]:
    """Return the map from student states to teacher states, in rising order.

    uniform: n maps to n * N / M (rounded, halves up), the last block of each group, as in
    TinyBERT (arXiv:1909.10351); the embeddings map to the embeddings. last: only the last to the last.

    Args:
        mapping: map of this stack.
        student: M, its blocks.
        teacher: N, its blocks.
    """
    if mapping == "last":
        return {student: teacher}
    if mapping == "uniform":
        return {n: (2 * n * teacher + student) // (2 * student) for n in range(student + 1)}
    return dict(sorted(mapping.items()))


def missing_states(mapping: StackMap, student: int | None, teacher: int | None) -> str | None:
    """Return the error text for states that do not exist, else None; unknown numbers of layers match."""
    if isinstance(mapping, str):
        return None
    for whose, numbers, there in (("student", mapping, student), ("teacher", mapping.values(), teacher)):
        if there is None:
            continue
        strange = sorted(n for n in numbers if not 0 <= n <= there)
        if strange:
            return (
                f"the {whose} has the states 0 (its embeddings) to {there} (its last layer), got"
                f" {', '.join(map(str, strange))}."
            )
    return None


def check_layer_map(
    layer_map: LayerMap, student: Mapping[str, Any], teacher: Mapping[str, Any] | None
) -> list[Message]:
    """Return the mistakes, each with its setting, for states and stacks that do not exist.

    Args:
        layer_map: of the settings.
        student: the Hugging Face config of the student.
        teacher: the teacher's Hugging Face config, None if unknown.
    """
    family = find_family(student)
    if family is None:
        return []
    found: list[Message] = []
    stacks = {stack.name: stack.num_layers(student) for stack in family.stacks(student)}
    if isinstance(layer_map, dict):
        strange: list[str] = [key for key in layer_map if isinstance(key, str) and key not in stacks]
        for key in strange:
            text = f"no such stack; a {family.name} model has {' and '.join(stacks)}."
            found.append(error_message("unknown-stack", text, setting=f"layer_map.{key}"))
    others = find_family(teacher) if teacher is not None else None
    theirs = {s.name: s.num_layers(teacher) for s in others.stacks(teacher)} if others and teacher else {}
    for name, count in stacks.items():
        if wrong := missing_states(stack_map(layer_map, name), count, theirs.get(name)):
            text = wrong if len(stacks) == 1 else f"{name}: {wrong}"
            found.append(error_message("unknown-layer", text, setting="layer_map"))
    return found
