"""What each edit does to a model, one function an op.

An edit is a dict with `op` and `module` (dotted name) and what the op needs:

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
    {"op": "fold", "module": m, "norm": n}                               Conv2d m gets a bias, its norm n goes
    {"op": "round", "module": m, "signed": s}                            states are rounded before m
    {"op": "unsigned", "module": m}                                      a quantized Conv2d reads nothing < 0
    {"op": "adapter", "module": m, "rank": r}                            a quantized Linear gets one beside it
    {"op": "binary_inputs", "module": m, "signed": s}                    a quantized Linear is fed two values
    {"op": "difference", "module": m, "rank": r}                         Linear -> SharedLinear
    {"op": "split", "module": m}                                         Linear -> the sum of two
    {"op": "share", "module": m, "with": n}                              m becomes the very module n
    {"op": "own_bias", "module": m, "heads": h}                          attention with its own position bias
    {"op": "mask", "module": m}                                          zeros of a Linear's weight stay
    {"op": "width", "module": "", "keep": [c, ...]}                      these channels of the states stay
    {"op": "skip", "module": b, "part": p}                               a part of the block b is gone

Edits only make room; the values come from the tensors. They work on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from smelt.core.errors import InputError, nearest
from smelt.families.registry import family_of
from smelt.runtime.layers.low_rank import LowRankEmbedding, LowRankLinear
from smelt.runtime.layers.low_rank_conv import LowRankConv, resized, steps_of
from smelt.runtime.layers.scaled import ScaledLinear
from smelt.runtime.layers.shared import SharedLinear
from smelt.runtime.layers.split import split_of
from smelt.runtime.models.edits.fold_norms import make_room
from smelt.runtime.models.edits.narrow import narrow
from smelt.runtime.models.edits.skip import skip
from smelt.runtime.models.edits.tie import tie
from smelt.runtime.models.structure import FILE, Edit, keep_zeros, replace_module, scheme_options


def apply_edits(model: nn.Module, edits: list[Edit]) -> None:
    """Apply `edits` to `model` in order, in place.

    Raises:
        InputError: an unknown op, or a module that the model does not have.
    """
    for edit in edits:
        word = str(edit.get("op"))[:60]
        op = _OPS.get(word)
        if op is None:
            raise InputError(
                f"{FILE}: unknown edit '{word}'. Known: {', '.join(_OPS)}.{nearest(word, _OPS)}",
                code="unknown-edit",
            )
        try:
            op(model, edit)
        except InputError:
            raise
        except Exception as error:  # torch raises many kinds for sizes and names that cannot be
            raise InputError(
                f"{FILE}: the edit {str(edit)[:200]} does not fit the model: {str(error)[:200]}",
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


def _conv(model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.Conv2d) or old.groups != 1:
        raise TypeError("it is not a Conv2d of one group")
    into, out = _fewer(edit["in_channels"], old.in_channels), _fewer(edit["out_channels"], old.out_channels)
    replace_module(model, edit["module"], resized(old, into, out))


def _batch_norm(model: nn.Module, edit: Edit) -> None:
    old = model.get_submodule(edit["module"])
    if not isinstance(old, nn.BatchNorm2d):
        raise TypeError("it is not a BatchNorm2d")
    size = _fewer(edit["num_features"], old.num_features)
    new = nn.BatchNorm2d(size, old.eps, old.momentum, device=old.weight.device, dtype=old.weight.dtype)
    replace_module(model, edit["module"], new)


def _fold(model: nn.Module, edit: Edit) -> None:
    make_room(model, edit["module"], edit["norm"])


def _round(model: nn.Module, edit: Edit) -> None:
    from smelt.runtime.layers.quantized_conv import Rounded

    if not isinstance(edit["signed"], bool):
        raise TypeError(f"signed {edit['signed']!r}")
    device = next((parameter.device for parameter in model.parameters()), None)
    new = Rounded(model.get_submodule(edit["module"]), edit["signed"], device)
    replace_module(model, edit["module"], new)


def _unsigned(model: nn.Module, edit: Edit) -> None:
    from smelt.runtime.layers.quantized_conv import QuantizedConv2d

    layer = model.get_submodule(edit["module"])
    if not isinstance(layer, QuantizedConv2d):
        raise TypeError("it is not a quantized Conv2d")
    layer.signed = False


def _fewer(asked: object, there: int) -> int:
    """Return how many channels stay: more than were there would take memory that no file has filled."""
    if type(asked) is not int or not 0 < asked <= there:
        raise ValueError(f"{str(asked)[:60]} of {there} channels")
    return asked


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
    from smelt.runtime.layers.quantized import QuantizedLinear

    module = model.get_submodule(edit["module"])
    if not isinstance(module, nn.Linear | QuantizedLinear):
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
    "conv": _conv,
    "batch_norm": _batch_norm,
    "fold": _fold,
    "round": _round,
    "unsigned": _unsigned,
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
