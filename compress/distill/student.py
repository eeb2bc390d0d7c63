"""Making a student: which layers of the teacher it keeps, and the edits that go with them."""

from __future__ import annotations

from typing import Any

from torch import nn

from smelt.core.errors import InputError
from smelt.core.text import article
from smelt.families.family import Stack
from smelt.families.registry import family_of
from smelt.families.walk import skipped_parts
from smelt.runtime.models.edits.skip import number_caches, word_of
from smelt.runtime.models.structure import Edit

# By the number of layers there are, then by that of the student: LAYERS_TO_COPY of make_student.py, in
# the examples that belong to Shleifer & Rush 2020, arXiv:2010.13002 (github.com/huggingface/transformers,
# examples/research_projects/seq2seq-distillation): BART has 12, Pegasus 16, Marian 6 layers.
_PUBLISHED: dict[int, dict[int, list[int]]] = {
    6: {2: [0, 5], 3: [0, 2, 5], 4: [0, 1, 3, 5]},
    12: {
        2: [0, 6],
        3: [0, 6, 11],
        4: [0, 4, 8, 11],
        6: [0, 2, 4, 7, 9, 11],
        9: [0, 1, 2, 4, 5, 7, 9, 10, 11],
    },
    16: {
        2: [0, 15],
        3: [0, 8, 15],
        4: [0, 5, 10, 15],
        6: [0, 3, 6, 9, 12, 15],
        8: [0, 2, 4, 6, 8, 10, 12, 15],
        9: [0, 1, 3, 5, 7, 9, 11, 13, 15],
        12: [0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15],
    },
}


def layers_to_copy(kept: int, layers: int, selection: str = "uniform") -> list[int]:
    """Return which `kept` of `layers` layers a student copies.

    `uniform` takes those that were published for 6, 12 and 16 layers (12 to 6 gives 0, 2, 4, 7, 9, 11), and
    for other numbers the first, the last and evenly spaced ones between; a single one is the first.
    `first` and `last` take one end.

    Raises:
        InputError: not between 1 and `layers`.
    """
    if not 1 <= kept <= layers:
        raise InputError(
            f"distill: the student cannot have {kept} of the source's {layers} layers; say 1 to {layers}.",
            code="more-than-model-has",
            setting="student",
        )
    if selection == "first":
        return list(range(kept))
    if selection == "last":
        return list(range(layers - kept, layers))
    published = _PUBLISHED.get(layers, {}).get(kept)
    if published is not None:
        return list(published)
    return [round(i * (layers - 1) / (kept - 1)) for i in range(kept)] if kept > 1 else [0]


def keep_layers(
    model: Any, edits: list[Edit], stack: str, choice: int | list[int], choose: str
) -> tuple[list[Edit], list[int]]:
    """Drop layers of one stack of `model` in place, and say so in its config.

    Args:
        model: a model of a family that smelt knows.
        edits: its structure so far.
        stack: `encoder_layers` or `decoder_layers` of an encoder and decoder, `layers` of the others.
        choice: how many layers, or which.
        choose: see `layers_to_copy`.

    Returns:
        The edits that remain, renamed to the new numbers, and the layers kept.

    Raises:
        InputError: the model has no such stack, or not these layers.
    """
    found = _stack(model, stack)
    place = found.place
    owner, _, name = place.rpartition(".")
    layers = list(model.get_submodule(place))
    kept = layers_to_copy(choice, len(layers), choose) if isinstance(choice, int) else list(choice)
    if not kept or sorted(set(kept)) != kept or not all(0 <= i < len(layers) for i in kept):
        raise InputError(
            f"distill: {stack}: {choice} must be rising numbers from 0 to {len(layers) - 1}.",
            code="wrong-layer-numbers",
            setting=f"student.{stack}",
        )
    family = family_of(model)
    if family and family.first_stays and kept[0] != 0:
        raise InputError(
            f"distill: {stack}: {choice} lacks the first layer: {family.first_stays}.",
            code="first-layer-required",
            setting=f"student.{stack}",
        )
    _require_parts(found, [layers[i] for i in kept], f"distill: {stack}: {choice}")
    setattr(model.get_submodule(owner), name, nn.ModuleList([layers[i] for i in kept]))
    if family and family.relative_bias:
        attending = [i for i, layer in enumerate(layers) if 0 not in skipped_parts(layer)]
        first = next(i for i in attending if i in kept)
        family.relative_bias().hand_on(layers[attending[0]], layers[first])
    for new, old in enumerate(kept):
        for module in layers[old].modules():
            if getattr(module, "layer_idx", None) is not None:
                module.layer_idx = new  # its place in the KV cache
    number_caches(model, found)
    setattr(model.config, found.setting, len(kept))
    for word in found.by_layer:
        values = getattr(model.config, word, None)
        if isinstance(values, list):
            setattr(model.config, word, [values[i] for i in kept])
    return _renamed(edits, place, kept), kept


def _stack(model: Any, name: str) -> Stack:
    family, config = family_of(model), model.config.to_dict()
    found = family.stack(config, name) if family else None
    if found is None:
        known = " and ".join(s.name for s in family.stacks(config)) if family else "no layers that it knows"
        raise InputError(
            f"distill: {article(model.config.model_type)} student has {known}, not '{name}'.",
            code="unknown-stack",
            setting=f"student.{name}",
        )
    return found


def _require_parts(stack: Stack, layers: list[Any], where: str) -> None:
    """Require that a part of each kind is left in the layers that stay, of which some may have been skipped.

    Raises:
        InputError: one is not.
    """
    for part in range(len(stack.attentions) + 1):
        if all(part in skipped_parts(layer) for layer in layers):
            raise InputError(
                f"{where} leaves no {word_of(stack, part)} in the {stack.name}: an earlier step took it out"
                " of the layers that stay. Keep one that has it.",
                code="no-part-left",
            )


def _renamed(edits: list[Edit], place: str, kept: list[int]) -> list[Edit]:
    """Return `edits` without those of dropped layers, with the new numbers of the kept ones.

    What a dropped layer owned and shared, the first kept layer that shares it owns.
    """
    names = {f"{place}.{old}": f"{place}.{new}" for new, old in enumerate(kept)}
    depth = place.count(".") + 2

    def rename(module: str) -> str | None:
        if not module.startswith(place + "."):
            return module
        parts = module.split(".")
        head = names.get(".".join(parts[:depth]))
        return None if head is None else ".".join([head, *parts[depth:]])

    while heir := next(
        (
            (e["module"], e["with"])
            for e in edits
            if "with" in e and rename(e["module"]) is not None and rename(e["with"]) is None
        ),
        None,
    ):
        edits = _inherited(edits, *heir)
    return [
        {**edit, "module": rename(edit["module"])}
        | ({"with": rename(edit["with"])} if "with" in edit else {})
        for edit in edits
        if rename(edit["module"]) is not None
    ]


def _inherited(edits: list[Edit], heir: str, owner: str) -> list[Edit]:
    """Return `edits` with `heir`, which shares what `owner` is, in the place of `owner`."""
    begins = next(i for i, e in enumerate(edits) if e["module"] == heir and e.get("with") == owner)

    def moved(name: str) -> str:
        return heir + name[len(owner) :] if _within(name, owner) else name

    result = []
    for place, edit in enumerate(edits):
        if place < begins and _within(edit["module"], heir):
            continue  # it was of the module that the shared one then replaced
        changed = {k: moved(v) if k in ("module", "with") else v for k, v in edit.items()}
        if changed.get("with") != changed["module"]:
            result.append(changed)
    return result


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
