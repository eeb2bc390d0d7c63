"""Structure travels as data: the ordered edits that turn the config's model into the stored one.

An edit is a dict with `op` and `module` (dotted name) and what the op needs:

    {"op": "linear", "module": m, "in_features": i, "out_features": o}   a Linear of another size
    {"op": "set", "module": m, "attribute": a, "value": v}               a whole number kept by a module
    {"op": "low_rank", "module": m, "rank": r}                           Linear -> LowRankLinear
    {"op": "low_rank_table", "module": m, "rank": r}                     Embedding -> LowRankEmbedding
    {"op": "tie", "module": m, "with": n}                                Linear m multiplies with the table n
    {"op": "quantize", "module": m, "scheme": s, ...}                    Linear, Embedding -> quantized one
    {"op": "scale", "module": m}                                         a Linear gets factors before it
    {"op": "adapter", "module": m, "rank": r}                            a quantized Linear gets one beside it
    {"op": "binary_inputs", "module": m, "signed": s}                    a quantized Linear is fed two values
    {"op": "difference", "module": m, "rank": r}                         Linear -> SharedLinear
    {"op": "split", "module": m}                                         Linear -> the sum of two
    {"op": "share", "module": m, "with": n}                              m becomes the very module n
    {"op": "own_bias", "module": m, "heads": h}                          attention with its own position bias
    {"op": "mask", "module": m}                                          zeros of a Linear's weight stay
    {"op": "width", "module": "", "keep": [c, ...]}                      these channels of the states stay
    {"op": "skip", "module": b, "part": p}                               a part of the block b is gone

Edits only make room; the values come from the tensors. A mask is not stored either: the zeros of the weight
are the mask. It belongs to the module and goes with it, so that `mask` edits are written last, of the layers
that have one then. They work on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from smelt.core.errors import InputError, nearest
from smelt.core.files import write_json
from smelt.families.registry import family_of
from smelt.runtime.layers.low_rank import LowRankEmbedding, LowRankLinear
from smelt.runtime.layers.low_rank_conv import LowRankConv, steps_of
from smelt.runtime.layers.scaled import ScaledLinear
from smelt.runtime.layers.shared import SharedLinear
from smelt.runtime.layers.split import split_of
from smelt.runtime.models.edits.narrow import narrow
from smelt.runtime.models.edits.skip import skip

Edit: TypeAlias = dict[str, Any]
FILE = "structure.json"
_MASKED = "smelt_keeps_zeros"


def apply_edits(model: nn.Module, edits: list[Edit]) -> None:
    """Apply `edits` to `model` in order, in place.

    Raises:
        InputError: an unknown op, or a module that the model does not have.
    """
    for edit in edits:
        word = str(edit.get("op"))[:60]
        op = _OPS.get(word)
        if op is None:
            raise InputError(f"{FILE}: unknown edit '{word}'. Known: {', '.join(_OPS)}.{nearest(word, _OPS)}")
        try:
            op(model, edit)
        except InputError:
            raise
        except Exception as error:  # torch raises many kinds for sizes and names that cannot be
            raise InputError(
                f"{FILE}: the edit {str(edit)[:200]} does not fit the model: {str(error)[:200]}"
            ) from error


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
        edits = json.loads(path.read_text(encoding="utf-8"))["edits"]
        if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
            raise TypeError("'edits' must be a list of objects")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: not a list of edits that this version of smelt reads: {error}") from error
    return edits


def write_edits(folder: Path, edits: list[Edit]) -> None:
    """Store `edits` in `folder`; nothing is written for none."""
    if edits:
        write_json(folder / FILE, {"schema": 1, "edits": edits})


def keep_zeros(module: nn.Linear) -> None:
    """Have the zeros of the weight of `module` stay zero in later training, and say so where it is saved."""
    setattr(module, _MASKED, True)


def keeps_zeros(module: nn.Module) -> bool:
    """Say whether the zeros of the weight of `module` are to stay zero; only of a Linear they can."""
    return isinstance(module, nn.Linear) and bool(getattr(module, _MASKED, False))


def with_masks(model: nn.Module, edits: list[Edit]) -> list[Edit]:
    """Return `edits` with a `mask`, at the end, for each layer of `model` whose zeros are to stay."""
    masked = [names[0] for module, names in names_of(model).items() if keeps_zeros(module)]
    others = [edit for edit in edits if edit.get("op") != "mask"]
    return [*others, *({"op": "mask", "module": name} for name in masked)]


def scheme_options(edit: Edit) -> dict[str, Any]:
    """Return what an edit `quantize` says besides the module and the scheme."""
    return {name: value for name, value in edit.items() if name not in ("op", "module", "scheme")}


def _linear(model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    new = nn.Linear(
        edit["in_features"],
        edit["out_features"],
        bias=old.bias is not None,
        device=old.weight.device,
        dtype=old.weight.dtype,
    )
    replace_module(model, edit["module"], new)


def _set(model: Any, edit: Edit) -> None:
    # only what counts heads: an artifact must not be able to change anything else of a module
    family = family_of(model)
    stacks = family.stacks(vars(model.config)) if family else ()
    counted = {name for stack in stacks for a in stack.attentions for name in (a.heads, a.size)}
    if edit["attribute"] not in counted or not isinstance(edit["value"], int):
        raise KeyError(f"attribute {edit['attribute']!r}")
    module = model.get_submodule(edit["module"])
    getattr(module, edit["attribute"])
    setattr(module, edit["attribute"], edit["value"])


def _thin(kind: type[LowRankLinear | SharedLinear], model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.Linear):
        raise TypeError("it is not a Linear")
    # the pair is made on the CPU, where a rank that cannot be would take all memory
    if not 0 < edit["rank"] <= max(old.in_features, old.out_features):
        raise ValueError(f"no matrix of this size has rank {edit['rank']}")
    new = kind(old.in_features, old.out_features, edit["rank"], old.bias is not None)
    replace_module(model, edit["module"], new.to(old.weight.device, old.weight.dtype))


def _low_rank_conv(model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.Conv2d):
        raise TypeError("it is not a Conv2d")
    ranks = edit["ranks"]
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise TypeError(f"ranks {ranks!r}")
    replace_module(model, edit["module"], LowRankConv(steps_of(str(edit["kind"]), old, ranks)))


def _low_rank_table(model: nn.Module, edit: Edit) -> None:
    from smelt.runtime.layers.quantized import is_table, keep_scale

    old = model.get_submodule(edit["module"])
    if not is_table(old):
        raise TypeError("it is not an Embedding")
    if not 0 < edit["rank"] <= max(old.weight.shape):
        raise ValueError(f"no table of this size has rank {edit['rank']}")
    new = LowRankEmbedding(old.num_embeddings, old.embedding_dim, edit["rank"], old.padding_idx)
    keep_scale(new, old)
    replace_module(model, edit["module"], new.to(old.weight.device, old.weight.dtype))


def tie(model: Any, name: str, table: str) -> Edit:
    """Let the Linear `name` multiply with the rows of the embedding `table`; return the edit that says so.

    A file then holds their matrix once, and whoever reads it ties it again.

    Raises:
        TypeError: they are no Linear and no Embedding.
        ValueError: their matrices have other shapes.
    """
    from smelt.runtime.layers.quantized import is_table

    linear, rows = model.get_submodule(name), model.get_submodule(table)
    if not isinstance(linear, nn.Linear) or not is_table(rows):
        raise TypeError("they are no Linear and no Embedding")
    if linear.weight.shape != rows.weight.shape:
        raise ValueError("they are of different sizes")
    linear.weight = rows.weight
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {**tied, f"{name}.weight": f"{table}.weight"}
    return {"op": "tie", "module": name, "with": table}


def _tie(model: nn.Module, edit: Edit) -> None:
    tie(model, edit["module"], edit["with"])


def _quantize(model: nn.Module, edit: Edit) -> None:
    from smelt.runtime.layers.quantized import empty_quantized

    new = empty_quantized(model.get_submodule(edit["module"]), edit["scheme"], scheme_options(edit))
    replace_module(model, edit["module"], new)


def _adapter(model: nn.Module, edit: Edit) -> None:
    from smelt.runtime.layers.adapted import AdaptedLinear
    from smelt.runtime.layers.quantized import QuantizedLinear

    old = model.get_submodule(edit["module"])
    coded = old.coded if isinstance(old, AdaptedLinear) else old
    if not isinstance(coded, QuantizedLinear):
        raise TypeError("it is not a quantized Linear")
    # it is made on the CPU, where a rank that cannot be would take all memory
    if not 0 < edit["rank"] <= min(coded.in_features, coded.out_features):
        raise ValueError(f"no adapter has rank {edit['rank']}")
    replace_module(model, edit["module"], AdaptedLinear(coded, edit["rank"]))


def _binary_inputs(model: nn.Module, edit: Edit) -> None:
    from smelt.runtime.layers.binary_inputs import BinaryInputs
    from smelt.runtime.layers.quantized import QuantizedLinear

    old = model.get_submodule(edit["module"])
    if not isinstance(old, QuantizedLinear):
        raise TypeError("it is not a quantized Linear")
    if not isinstance(edit["signed"], bool):
        raise TypeError(f"signed {edit['signed']!r}")
    replace_module(model, edit["module"], BinaryInputs(old, edit["signed"]))


def _scale(model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.Linear):
        raise TypeError("it is not a Linear")
    replace_module(model, edit["module"], ScaledLinear(old))


def _split(model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.Linear):
        raise TypeError("it is not a Linear")
    replace_module(model, edit["module"], split_of(old))


def _share(model: nn.Module, edit: Edit) -> None:
    replace_module(model, edit["module"], model.get_submodule(edit["with"]))


def _own_bias(model: nn.Module, edit: Edit) -> None:
    family = family_of(model)
    if family is None or family.relative_bias is None:
        raise TypeError("the model has no position bias")
    family.relative_bias().own(model.get_submodule(edit["module"]), edit["heads"], edit["module"])


def _mask(model: nn.Module, edit: Edit) -> None:
    module = model.get_submodule(edit["module"])
    if not isinstance(module, nn.Linear):
        raise TypeError("it is not a Linear")
    keep_zeros(module)


def _skip(model: nn.Module, edit: Edit) -> None:
    skip(model, edit["module"], edit["part"])


def _width(model: nn.Module, edit: Edit) -> None:
    narrow(model, edit["keep"])


_OPS: dict[str, Callable[[nn.Module, Edit], None]] = {
    "linear": _linear,
    "set": _set,
    "low_rank": partial(_thin, LowRankLinear),
    "difference": partial(_thin, SharedLinear),
    "low_rank_conv": _low_rank_conv,
    "low_rank_table": _low_rank_table,
    "tie": _tie,
    "quantize": _quantize,
    "adapter": _adapter,
    "binary_inputs": _binary_inputs,
    "scale": _scale,
    "split": _split,
    "share": _share,
    "own_bias": _own_bias,
    "mask": _mask,
    "skip": _skip,
    "width": _width,
}
