"""Select the teacher layers that a student copies, and renumber the model's edits."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.backbone_utils import BackboneConfigMixin

from smelt.core.errors import InputError
from smelt.core.messages import with_article
from smelt.models.edits import Edit
from smelt.models.families.config_keys import set_config_value
from smelt.models.families.layout import Stack
from smelt.models.families.registry import family_of, skipped_parts
from smelt.models.layers import renumber_caches, sublayer_name

# Keyed by the number of layers, then by the student's: LAYERS_TO_COPY of make_student.py, from the examples
# of Shleifer & Rush 2020, arXiv:2010.13002 (github.com/huggingface/transformers,
# examples/research_projects/seq2seq-distillation): BART has 12, Pegasus 16, Marian 6 layers.
_PUBLISHED_LAYERS: dict[int, dict[int, list[int]]] = {
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


def layers_to_copy(num_copied: int, layers: int, selection: str = "uniform") -> list[int]:
    """Return the indices of the layers that a student copies; 1 <= `num_copied` <= `layers`.

    `uniform` returns the published choice for 6, 12 and 16 layers (12 to 6 gives 0, 2, 4, 7, 9, 11), and for
    other numbers the first, the last and evenly spaced ones between; a single one is the first.
    `first` and `last` return the layers at that end.
    """
    if selection == "first":
        return list(range(num_copied))
    if selection == "last":
        return list(range(layers - num_copied, layers))
    published = _PUBLISHED_LAYERS.get(layers, {}).get(num_copied)
    if published is not None:
        return list(published)
    return [round(i * (layers - 1) / (num_copied - 1)) for i in range(num_copied)] if num_copied > 1 else [0]


def keep_layers(
    model: Any,
    edits: list[Edit],
    stack: str,
    choice: int | list[int],
    layer_selection: str,
    *,
    stage: str,
    prefix: str = "",
) -> tuple[list[Edit], list[int]]:
    """Drop layers of one stack of `model` in place and update its config.

    Args:
        model: a model of a supported family.
        edits: its edits so far.
        stack: `encoder_layers` or `decoder_layers` of an encoder and decoder, `layers` of the others.
        choice: number of layers, or their indices.
        layer_selection: see `layers_to_copy`.
        stage: the stage, for errors.
        prefix: for errors: what precedes `stack` in the settings of the stage, such as `student.`.

    Returns:
        The remaining edits with the new layer numbers, and the indices of the kept layers.

    Raises:
        InputError: the model has no such stack or no such layers.
    """
    setting = f"{prefix}{stack}"
    layer_stack = _find_stack(model, stack, stage, setting)
    module_path = layer_stack.module_path
    owner, _, attribute = module_path.rpartition(".")
    layers = layer_stack.modules(model)
    if isinstance(choice, int) and not 1 <= choice <= len(layers):
        raise InputError(
            f"{stage}: {setting}: cannot keep {choice} of the model's {len(layers)} layers. Choose a number"
            f" from 1 to {len(layers)}.",
            code="more-than-model-has",
            setting=setting,
        )
    kept_indices = (
        layers_to_copy(choice, len(layers), layer_selection) if isinstance(choice, int) else list(choice)
    )
    if (
        not kept_indices
        or sorted(set(kept_indices)) != kept_indices
        or not all(0 <= i < len(layers) for i in kept_indices)
    ):
        raise InputError(
            f"{stage}: {setting}: expected increasing layer indices from 0 to {len(layers) - 1}, got"
            f" {choice}.",
            code="wrong-layer-numbers",
            setting=setting,
        )
    family = family_of(model)
    if family and family.first_layer_reason and kept_indices[0] != 0:
        raise InputError(
            f"{stage}: {setting}: {choice} must include the first layer: {family.first_layer_reason}.",
            code="first-layer-required",
            setting=setting,
        )
    _require_parts(layer_stack, [layers[i] for i in kept_indices], f"{stage}: {setting}: {choice}")
    if not layer_stack.repeats_block:
        setattr(model.get_submodule(owner), attribute, nn.ModuleList([layers[i] for i in kept_indices]))
    if family and family.relative_bias:
        attending = [i for i, layer in enumerate(layers) if 0 not in skipped_parts(layer)]
        first_attending = next(i for i in attending if i in kept_indices)
        family.relative_bias().move_table(layers[attending[0]], layers[first_attending])
    for new_index, old_index in enumerate(kept_indices):
        for module in layers[old_index].modules():
            if getattr(module, "layer_idx", None) is not None:
                module.layer_idx = new_index  # its place in the KV cache
    renumber_caches(model, layer_stack)
    set_config_value(model.config, layer_stack.num_layers_key, len(kept_indices))
    # names a stage for each layer, which a classifier ignores
    if isinstance(model.config, BackboneConfigMixin):
        model.config.stage_names = model.config.stage_names[: len(kept_indices) + 1]
        model.config.set_output_features_output_indices(out_features=None, out_indices=None)
    for key in layer_stack.per_layer_keys:
        values = getattr(model.config, key, None)
        if isinstance(values, list):
            setattr(model.config, key, [values[i] for i in kept_indices])
    return (
        edits if layer_stack.repeats_block else _renumber_edits(edits, module_path, kept_indices)
    ), kept_indices


def _find_stack(model: Any, name: str, stage: str, setting: str) -> Stack:
    family, config = family_of(model), model.config.to_dict()
    stack = family.stack(config, name) if family else None
    if stack is None:
        available = (
            " and ".join(s.name for s in family.stacks(config)) if family else "no layers that it knows"
        )
        raise InputError(
            f"{stage}: {setting}: {with_article(model.config.model_type)} model has no '{name}'. Use"
            f" {available}.",
            code="unknown-stack",
            setting=setting,
        )
    return stack


def _require_parts(stack: Stack, layers: list[Any], location: str) -> None:
    """Require that the kept layers have a part of each kind; `drop-layers` may have removed some.

    Raises:
        InputError: a kind of part is missing.
    """
    for part_index in range(len(stack.attentions) + 1):
        if all(part_index in skipped_parts(layer) for layer in layers):
            raise InputError(
                f"{location} keeps no {sublayer_name(stack, part_index)} in the {stack.name}: an earlier"
                " step removed it from these layers. Keep a layer that has it.",
                code="no-part-left",
            )


def _renumber_edits(edits: list[Edit], stack_path: str, kept_layers: list[int]) -> list[Edit]:
    """Return `edits` without those of dropped layers, with the new numbers of the kept layers.

    A module that a dropped layer owned and shared becomes owned by the first kept layer that shares it.
    """
    names = {
        f"{stack_path}.{old_index}": f"{stack_path}.{new_index}"
        for new_index, old_index in enumerate(kept_layers)
    }
    depth = stack_path.count(".") + 2

    def rename(module: str) -> str | None:
        if not module.startswith(stack_path + "."):
            return module
        parts = module.split(".")
        head = names.get(".".join(parts[:depth]))
        return None if head is None else ".".join([head, *parts[depth:]])

    while transfer := next(
        (
            (e["module"], e["with"])
            for e in edits
            if "with" in e and rename(e["module"]) is not None and rename(e["with"]) is None
        ),
        None,
    ):
        edits = _transfer_edits(edits, *transfer)
    return [
        {**edit, "module": rename(edit["module"])}
        | ({"with": rename(edit["with"])} if "with" in edit else {})
        for edit in edits
        if rename(edit["module"]) is not None
    ]


def _transfer_edits(edits: list[Edit], heir: str, owner: str) -> list[Edit]:
    """Return `edits` with `heir`, which shares the module `owner`, as its new owner."""
    share_index = next(i for i, e in enumerate(edits) if e["module"] == heir and e.get("with") == owner)

    def moved(name: str) -> str:
        return heir + name[len(owner) :] if _is_inside(name, owner) else name

    result = []
    for index, edit in enumerate(edits):
        if index < share_index and _is_inside(edit["module"], heir):
            continue  # an edit of the module that sharing replaced
        renamed = {k: moved(v) if k in ("module", "with") else v for k, v in edit.items()}
        if renamed.get("with") != renamed["module"]:
            result.append(renamed)
    return result


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
