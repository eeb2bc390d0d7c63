"""Structure edits: the differences between a model and its config, applied by one function per op.

Every change of a model's structure is such an edit. They are stored with the model, and loading applies them
again, in order. An edit is a dict with `op` and `module` (dotted name) and the arguments of the op:

    {"op": "linear", "module": m, "in_features": i, "out_features": o}   a Linear of another size
    {"op": "set", "module": m, "attribute": a, "value": v}               a whole number kept by a module
    {"op": "low_rank", "module": m, "rank": r}                           Linear -> LowRankLinear
    {"op": "low_rank_conv", "module": m, "kind": k, "ranks": [r, ...]}   Conv2d -> LowRankConv
    {"op": "low_rank_table", "module": m, "rank": r}                     Embedding -> LowRankEmbedding
    {"op": "tie", "module": m, "with": n}                                Linear m multiplies with the table n
    {"op": "quantize", "module": m, "scheme": s, ...}                    Linear, Embedding -> quantized one
    {"op": "scale", "module": m}                                         a Linear gets factors before it
    {"op": "conv", "module": m, "in_channels": s, "out_channels": t}     Conv2d -> one of these sizes
    {"op": "batch_norm", "module": m, "num_features": c}                 BatchNorm2d -> one of this size
    {"op": "fold", "module": m, "norm": n}                               Conv2d m gets a bias; no norm n
    {"op": "round", "module": m}                                         states are rounded before m
    {"op": "adapter", "module": m, "rank": r}                            quantized Linear, low-rank addition
    {"op": "difference", "module": m, "rank": r}                         Linear -> SharedLinear
    {"op": "split", "module": m}                                         Linear -> the sum of two
    {"op": "share", "module": m, "with": n}                              m becomes the same module as n
    {"op": "own_bias", "module": m, "heads": h}                          attention with its own position bias
    {"op": "mask", "module": m}                                          zeros of a Linear's weight are kept
    {"op": "width", "module": "", "keep": [c, ...]}                      these channels of the states are kept
    {"op": "skip", "module": b, "part": p}                               a part of the block b is removed

Edits only create the structure; the values come from the tensors. They work on the meta device.

A mask is not stored: the zeros of the weight are the mask. It belongs to the module and is removed with it,
so that `mask` edits are written last, for the layers that have one then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import load_json, write_json
from smelt.models.families.registry import family_of
from smelt.models.hidden_width import prune_hidden_width
from smelt.models.layers import (
    LowRankConv,
    LowRankCorrectedLinear,
    LowRankEmbedding,
    LowRankLinear,
    ScaledLinear,
    SharedLinear,
    conv_end_names,
    make_conv_steps,
    resize_batch_norm,
    resize_conv,
    skip_sublayer,
)
from smelt.models.user_module import traced_conv_norms
from smelt.quantization.layers import (
    QuantizedActivation,
    QuantizedLinear,
    copy_embed_scale,
    empty_quantized,
    is_embedding_table,
    make_split_linear,
)

Edit: TypeAlias = dict[str, Any]
STRUCTURE_FILE = "structure.json"
_MASKED_ATTRIBUTE = "smelt_keeps_zeros"


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the submodule with the dotted `name` by `new`."""
    parent, _, child = name.rpartition(".")
    parent_module = model.get_submodule(parent)
    parent_module.get_submodule(child)  # raises AttributeError if it does not exist
    setattr(parent_module, child, new)


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
    for alias in aliases:
        if model.get_submodule(alias) is not new:  # else it is in a module that is shared as a whole
            replace_module(model, alias, new)
            edits.append({"op": "share", "module": alias, "with": name})


def module_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module of `model` once, in order, with all the dotted names that it has."""
    names_of_modules: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names_of_modules.setdefault(module, []).append(name)
    return names_of_modules


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


_KEPT_INDICES_ATTRIBUTE = "smelt_places_left"


def record_kept_indices(old: nn.Module, new: nn.Module, indices: torch.Tensor, dim: int) -> None:
    """Record that `new` has only the `indices` of the rows (dim 0) or columns (dim 1) of the Linear `old`."""
    all_indices = list(kept_indices(old))
    before = all_indices[dim]
    all_indices[dim] = indices if before is None else before[indices]
    setattr(new, _KEPT_INDICES_ATTRIBUTE, tuple(all_indices))


def kept_indices(module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the rows and columns kept of the original layer, int64, ascending; None where all are kept."""
    indices: tuple[torch.Tensor | None, torch.Tensor | None] = getattr(
        module, _KEPT_INDICES_ATTRIBUTE, (None, None)
    )
    return indices


def quantize_edit_options(edit: Edit) -> dict[str, Any]:
    """Return the scheme's options in an edit `quantize`."""
    return {name: value for name, value in edit.items() if name not in ("op", "module", "scheme")}


def tie_linear(model: Any, name: str, table: str) -> Edit:
    """Tie the Linear `name` to the embedding `table`; return the edit.

    A file then contains their matrix once, and loading ties it again.

    Raises:
        TypeError: they are not a Linear and an Embedding.
        ValueError: their matrices have other shapes.
    """
    linear, embedding = model.get_submodule(name), model.get_submodule(table)
    if not isinstance(linear, nn.Linear) or not is_embedding_table(embedding):
        raise TypeError("they are not a Linear and an Embedding")
    if linear.weight.shape != embedding.weight.shape:
        raise ValueError("they have different sizes")
    linear.weight = embedding.weight
    tied_weights = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {**tied_weights, f"{name}.weight": f"{table}.weight"}
    return {"op": "tie", "module": name, "with": table}


def fold_batch_norms(model: Any) -> list[Edit]:
    """Fold each batch norm of `model` into its convolution, in place; return the edits.

    The model's family defines which norm follows which convolution; of a user's module its trace shows it. In
    inference a batch norm multiplies and
    shifts each channel by constants, and so can the convolution before it. Graph optimizers fold the two as
    well, but then a constant of the graph belongs to no layer of the model, and quantized kernels would
    differ.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 3.2; torch.nn.utils.fusion.
    """
    edits: list[Edit] = []
    for convolution, norm in _convolutions_with_norms(model):
        last, norm_layer = conv_end_names(model, convolution)[1], model.get_submodule(norm)
        layer = model.get_submodule(last)
        if not isinstance(layer, nn.Conv2d) or not isinstance(norm_layer, nn.BatchNorm2d):
            continue
        mean, variance = norm_layer.running_mean, norm_layer.running_var
        assert mean is not None
        assert variance is not None
        with torch.no_grad():
            layer.weight, layer.bias = fuse_conv_bn_weights(
                layer.weight, layer.bias, mean, variance, norm_layer.eps, norm_layer.weight, norm_layer.bias
            )  # fmt: skip
        replace_module(model, norm, nn.Identity())
        edits.append({"op": "fold", "module": last, "norm": norm})
    return edits


def _convolutions_with_norms(model: Any) -> list[tuple[str, str]]:
    """Return the names of each convolution and the batch norm that alone uses its output."""
    family = family_of(model)
    if family is not None and family.is_user_module:
        return traced_conv_norms(model)
    return [
        (f"{name}.{convolution}", f"{name}.{norm}")
        for name, module in model.named_modules()
        for convolution, norm in (family.convs_and_norms if family else ())
        if all(isinstance(getattr(module, child, None), nn.Module) for child in (convolution, norm))
    ]


def prepare_folded_conv(model: nn.Module, convolution: str, norm: str) -> None:
    """Give `convolution` a bias and replace `norm` by an identity, as `fold_batch_norms` does.

    Raises:
        TypeError: they are not a convolution and a batch norm.
    """
    layer, norm_layer = model.get_submodule(convolution), model.get_submodule(norm)
    if not isinstance(layer, nn.Conv2d) or not isinstance(norm_layer, nn.BatchNorm2d):
        raise TypeError("they are not a Conv2d and a BatchNorm2d")
    bias = torch.zeros(layer.out_channels, device=layer.weight.device, dtype=layer.weight.dtype)
    layer.bias = nn.Parameter(bias)
    replace_module(model, norm, nn.Identity())


def apply_edits(model: nn.Module, edits: list[Edit]) -> None:
    """Apply `edits` to `model` in order, in place.

    Raises:
        InputError: an unknown op, or a module that the model does not have.
    """
    for edit in edits:
        op_name = str(edit.get("op"))[:60]
        op = _OPS.get(op_name)
        if op is None:
            raise InputError(
                f"{STRUCTURE_FILE}: unknown edit '{op_name}'. Known:"
                f" {', '.join(_OPS)}.{did_you_mean(op_name, _OPS)}",
                code="unknown-edit",
            )
        try:
            op(model, edit)
        except InputError:
            raise
        except Exception as error:  # torch raises many kinds for invalid sizes and names
            raise InputError(
                f"{STRUCTURE_FILE}: the edit {str(edit)[:200]} does not fit the model: {str(error)[:200]}",
                code="does-not-fit-model",
            ) from error


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
    # only head counts: an artifact must not be able to change anything else of a module
    family = family_of(model)
    stacks = family.stacks(vars(model.config)) if family else ()
    count_attributes = {
        name
        for stack in stacks
        for a in stack.attentions
        for name in (a.heads_attribute, a.all_head_size_attribute)
    }
    if edit["attribute"] not in count_attributes or not isinstance(edit["value"], int):
        raise KeyError(f"attribute {edit['attribute']!r}")
    module = model.get_submodule(edit["module"])
    getattr(module, edit["attribute"])
    setattr(module, edit["attribute"], edit["value"])


def _low_rank(kind: type[LowRankLinear | SharedLinear], model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.Linear):
        raise TypeError("it is not a Linear")
    # the factors are created on the CPU, where an invalid rank would take all memory
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
    replace_module(model, edit["module"], LowRankConv(make_conv_steps(str(edit["kind"]), old, ranks)))


def _conv(model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.Conv2d) or old.groups not in (1, old.in_channels):
        raise TypeError("it is not a Conv2d of one group, or depthwise")
    in_channels, out_channels = (
        _checked_width(edit["in_channels"], old.in_channels),
        _checked_width(edit["out_channels"], old.out_channels),
    )
    replace_module(model, edit["module"], resize_conv(old, in_channels, out_channels))


def _batch_norm(model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.BatchNorm2d):
        raise TypeError("it is not a BatchNorm2d")
    size = _checked_width(edit["num_features"], old.num_features)
    replace_module(model, edit["module"], resize_batch_norm(old, size))


def _fold(model: nn.Module, edit: Edit) -> None:
    prepare_folded_conv(model, edit["module"], edit["norm"])


def _round(model: nn.Module, edit: Edit) -> None:
    device = next((parameter.device for parameter in model.parameters()), None)
    new = QuantizedActivation(model.get_submodule(edit["module"]), device)
    replace_module(model, edit["module"], new)


def _checked_width(asked: object, present: int) -> int:
    """Return the number of kept channels: more than before would take memory that no file has filled."""
    if type(asked) is not int or not 0 < asked <= present:
        raise ValueError(f"{str(asked)[:60]} of {present} channels")
    return asked


def _low_rank_table(model: nn.Module, edit: Edit) -> None:

    old = model.get_submodule(edit["module"])
    if not is_embedding_table(old):
        raise TypeError("it is not an Embedding")
    if not 0 < edit["rank"] <= max(old.weight.shape):
        raise ValueError(f"no table of this size has rank {edit['rank']}")
    new = LowRankEmbedding(old.num_embeddings, old.embedding_dim, edit["rank"], old.padding_idx)
    copy_embed_scale(new, old)
    replace_module(model, edit["module"], new.to(old.weight.device, old.weight.dtype))


def _tie(model: nn.Module, edit: Edit) -> None:
    tie_linear(model, edit["module"], edit["with"])


def _quantize(model: nn.Module, edit: Edit) -> None:

    new = empty_quantized(model.get_submodule(edit["module"]), edit["scheme"], quantize_edit_options(edit))
    replace_module(model, edit["module"], new)


def _adapter(model: nn.Module, edit: Edit) -> None:

    old = model.get_submodule(edit["module"])
    quantized = old.coded if isinstance(old, LowRankCorrectedLinear) else old
    if not isinstance(quantized, QuantizedLinear):
        raise TypeError("it is not a quantized Linear")
    # it is created on the CPU, where an invalid rank would take all memory
    if not 0 < edit["rank"] <= min(quantized.in_features, quantized.out_features):
        raise ValueError(f"no adapter has rank {edit['rank']}")
    replace_module(model, edit["module"], LowRankCorrectedLinear(quantized, edit["rank"]))


def _scale(model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.Linear):
        raise TypeError("it is not a Linear")
    replace_module(model, edit["module"], ScaledLinear(old))


def _split(model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.Linear):
        raise TypeError("it is not a Linear")
    replace_module(model, edit["module"], make_split_linear(old))


def _share(model: nn.Module, edit: Edit) -> None:
    replace_module(model, edit["module"], model.get_submodule(edit["with"]))


def _own_bias(model: nn.Module, edit: Edit) -> None:
    family = family_of(model)
    if family is None or family.relative_bias is None:
        raise TypeError("the model has no position bias")
    family.relative_bias().make_independent(
        model.get_submodule(edit["module"]), edit["heads"], edit["module"]
    )


def _mask(model: nn.Module, edit: Edit) -> None:

    module = model.get_submodule(edit["module"])
    if not isinstance(module, nn.Linear | QuantizedLinear):
        raise TypeError("it is not a Linear")
    mark_masked(module)


def _skip(model: nn.Module, edit: Edit) -> None:
    skip_sublayer(model, edit["module"], edit["part"])


def _width(model: nn.Module, edit: Edit) -> None:
    prune_hidden_width(model, edit["keep"])


_OPS: dict[str, Callable[[nn.Module, Edit], None]] = {
    "linear": _linear,
    "set": _set,
    "low_rank": partial(_low_rank, LowRankLinear),
    "difference": partial(_low_rank, SharedLinear),
    "low_rank_conv": _low_rank_conv,
    "conv": _conv,
    "batch_norm": _batch_norm,
    "fold": _fold,
    "round": _round,
    "low_rank_table": _low_rank_table,
    "tie": _tie,
    "quantize": _quantize,
    "adapter": _adapter,
    "scale": _scale,
    "split": _split,
    "share": _share,
    "own_bias": _own_bias,
    "mask": _mask,
    "skip": _skip,
    "width": _width,
}
