"""Structure edits: a list of differences between a model and its config, stored with it.

Every change of a model's structure is such an edit (a dict with `op` and `module`, a dotted name, and
the op's arguments); loading applies the edits again, in order (`smelt.models.edits`).

A mask is not stored: the zeros of the weight are the mask. It belongs to the module and is removed with it,
so that `mask` edits are written last, for the layers that have one then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from smelt.core.errors import InputError
from smelt.core.files import load_json, write_json

Edit: TypeAlias = dict[str, Any]
STRUCTURE_FILE = "structure.json"
_MASKED_ATTRIBUTE = "smelt_keeps_zeros"


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the submodule with the dotted `name` by `new`."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    owner.get_submodule(child)  # raises AttributeError if it does not exist
    setattr(owner, child, new)


def replace_layer(model: nn.Module, edits: list[Edit], name: str, new: nn.Module, edit: Edit) -> None:
    """Replace the layer called `name` by `new`, in every place of that layer.

    So layers that are shared stay shared. Loading does the same: `edit` is appended to `edits`, and for
    each other place a `share` with `name`.

    Args:
        model: changed in place.
        edits: its structure.
        name: one of the layer's names, dotted.
        new: the replacement; it may already be in `model`.
        edit: creates the structure of `new` at `name`.
    """
    old = model.get_submodule(name)
    aliases = [n for n, m in model.named_modules(remove_duplicate=False) if m is old and n != name]
    replace_module(model, name, new)
    edits.append(edit)
    for other in aliases:
        if model.get_submodule(other) is not new:  # else it is in a module that is shared as a whole
            replace_module(model, other, new)
            edits.append({"op": "share", "module": other, "with": name})


def module_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module of `model` once, in order, with all the dotted names that it has."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def read_edits(folder: Path) -> list[Edit]:
    """Return the edits stored in `folder`; an empty list where there is no structure.json."""
    path = folder / STRUCTURE_FILE
    if not path.is_file():
        return []
    try:
        edits = load_json(path)["edits"]
        if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
            raise TypeError("'edits' must be a list of objects")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path}: this version of smelt cannot read this list of edits: {error}", code="damaged-file"
        ) from error
    return edits


def write_edits(folder: Path, edits: list[Edit]) -> None:
    """Write `edits` to `folder`; nothing is written for an empty list."""
    if edits:
        write_json(folder / STRUCTURE_FILE, {"schema": 1, "edits": edits})


def mark_masked(module: nn.Module) -> None:
    """Mark that the zeros of the weight of `module` stay zero in later training, also after saving.

    module: a Linear, float or quantized.
    """
    setattr(module, _MASKED_ATTRIBUTE, True)


def is_masked(module: nn.Module) -> bool:
    """Return whether the zeros of the weight of `module` are to stay zero; only a Linear supports it."""
    return bool(getattr(module, _MASKED_ATTRIBUTE, False))


def add_mask_edits(model: nn.Module, edits: list[Edit]) -> list[Edit]:
    """Return `edits` with a `mask`, at the end, for each layer of `model` whose zeros are to stay zero."""
    masked = [names[0] for module, names in module_names(model).items() if is_masked(module)]
    other_edits = [edit for edit in edits if edit.get("op") != "mask"]
    return [*other_edits, *({"op": "mask", "module": name} for name in masked)]


def quantize_edit_options(edit: Edit) -> dict[str, Any]:
    """Return the scheme's options in an edit `quantize`."""
    return {name: value for name, value in edit.items() if name not in ("op", "module", "scheme")}
