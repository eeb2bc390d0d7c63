"""The setting `layer_map` of `distill`: which layer or module of the teacher each of the student learns from.

Hidden states are numbered as in transformers: 0 is the embedding output, n the output of block n.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import StringConstraints

from smelt.core.messages import Message, error_message
from smelt.models.families.registry import find_family

StackName = Literal["encoder_layers", "decoder_layers", "layers", "text_layers", "vision_layers"]
StackMap: TypeAlias = Literal["uniform", "last"] | dict[int, int]
# With a dot, unlike the name of a stack.
ModuleName = Annotated[str, StringConstraints(pattern=r"^\w+(\.\w+)+$")]
LayerMap: TypeAlias = StackMap | dict[StackName, StackMap] | dict[ModuleName, ModuleName]


def module_pairs(layer_map: LayerMap) -> dict[str, str]:
    """Return the teacher's modules by those of the student; empty if `layer_map` has numbers of layers."""
    pairs = layer_map if isinstance(layer_map, dict) else {}
    return {name: other for name, other in pairs.items() if isinstance(name, str) and "." in name}  # type: ignore[misc]


def stack_map(layer_map: LayerMap, stack: str) -> StackMap:
    """Return the map of one stack; uniform if `layer_map` does not name it."""
    if isinstance(layer_map, str):
        return layer_map
    by_stack: Any = layer_map
    if all(isinstance(key, int) for key in by_stack):
        return dict(by_stack)
    mapping: StackMap = by_stack.get(stack, "uniform")
    return mapping


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
    for role, indices, count in (("student", mapping, student), ("teacher", mapping.values(), teacher)):
        if count is None:
            continue
        missing = sorted(n for n in indices if not 0 <= n <= count)
        if missing:
            return (
                f"the {role} has the states 0 (its embeddings) to {count} (its last layer), got"
                f" {', '.join(map(str, missing))}."
            )
    return None


def check_layer_map(
    layer_map: LayerMap, student: Mapping[str, Any], teacher: Mapping[str, Any] | None
) -> list[Message]:
    """Return the errors, each with its setting, for states and stacks that do not exist.

    Args:
        layer_map: of the settings.
        student: the Hugging Face config of the student.
        teacher: the teacher's Hugging Face config, None if unknown.
    """
    family = find_family(student)
    if family is None or module_pairs(layer_map):
        return []
    errors: list[Message] = []
    stacks = {stack.name: stack.num_layers(student) for stack in family.stacks(student)}
    if isinstance(layer_map, dict):
        unknown: list[str] = [key for key in layer_map if isinstance(key, str) and key not in stacks]
        for key in unknown:
            text = f"no such stack; a {family.name} model has {' and '.join(stacks)}."
            errors.append(error_message("unknown-stack", text, setting=f"layer_map.{key}"))
    teacher_family = find_family(teacher) if teacher is not None else None
    teacher_counts = (
        {s.name: s.num_layers(teacher) for s in teacher_family.stacks(teacher)}
        if teacher_family and teacher
        else {}
    )
    for name, count in stacks.items():
        if error := missing_states(stack_map(layer_map, name), count, teacher_counts.get(name)):
            text = error if len(stacks) == 1 else f"{name}: {error}"
            errors.append(error_message("unknown-layer", text, setting="layer_map"))
    return errors
