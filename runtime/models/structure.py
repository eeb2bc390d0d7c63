"""Structure travels as data: what differs from the model that the config says is a list of edits beside it.

Whoever changes a model's structure says it in such an edit (a dict with `op` and `module`, a dotted name, and
what the op needs); loading makes the edits again, in order (`smelt.runtime.models.edits.apply`).

A mask is not stored: the zeros of the weight are the mask. It belongs to the module and goes with it, so that
`mask` edits are written last, of the layers that have one then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from smelt.core.errors import InputError
from smelt.core.files import load_json, write_json

Edit: TypeAlias = dict[str, Any]
FILE = "structure.json"
_MASKED = "smelt_keeps_zeros"


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` in the place of the submodule with the dotted `name`."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    owner.get_submodule(child)  # raises AttributeError where there is none
    setattr(owner, child, new)


def replace_layer(model: nn.Module, edits: list[Edit], name: str, new: nn.Module, edit: Edit) -> None:
    """Put `new` in the place of the layer called `name`, and wherever else that very layer stands.

    So layers that are shared stay shared. Loading does the same: `edit` is appended to `edits`, and for
    each other place a `share` with `name`.

    Args:
        model: changed in place.
        edits: its structure.
        name: one of the layer's names, dotted.
        new: what takes its place; it may stand in `model` already.
        edit: what makes room for `new` at `name`.
    """
    old = model.get_submodule(name)
    others = [n for n, m in model.named_modules(remove_duplicate=False) if m is old and n != name]
    replace_module(model, name, new)
    edits.append(edit)
    for other in others:
        if model.get_submodule(other) is not new:  # else it stands in a module that is shared as a whole
            replace_module(model, other, new)
            edits.append({"op": "share", "module": other, "with": name})


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module of `model` once, in order, with all the dotted names that it has."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def read_edits(folder: Path) -> list[Edit]:
    """Return the edits stored in `folder`; an empty list where there is no structure.json."""
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        edits = load_json(path)["edits"]
        if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
            raise TypeError("'edits' must be a list of objects")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path}: not a list of edits that this version of smelt reads: {error}", code="damaged-file"
        ) from error
    return edits


def write_edits(folder: Path, edits: list[Edit]) -> None:
    """Store `edits` in `folder`; nothing is written for none."""
    if edits:
        write_json(folder / FILE, {"schema": 1, "edits": edits})


def keep_zeros(module: nn.Module) -> None:
    """Have the zeros of the weight of `module` stay zero in later training, and say so where it is saved.

    module: a Linear, of floats or of codes.
    """
    setattr(module, _MASKED, True)


def keeps_zeros(module: nn.Module) -> bool:
    """Say whether the zeros of the weight of `module` are to stay zero; only of a Linear they can."""
    return bool(getattr(module, _MASKED, False))


def with_masks(model: nn.Module, edits: list[Edit]) -> list[Edit]:
    """Return `edits` with a `mask`, at the end, for each layer of `model` whose zeros are to stay."""
    masked = [names[0] for module, names in names_of(model).items() if keeps_zeros(module)]
    others = [edit for edit in edits if edit.get("op") != "mask"]
    return [*others, *({"op": "mask", "module": name} for name in masked)]


def scheme_options(edit: Edit) -> dict[str, Any]:
    """Return what an edit `quantize` says besides the module and the scheme."""
    return {name: value for name, value in edit.items() if name not in ("op", "module", "scheme")}
