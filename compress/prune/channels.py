"""Pruning of convolution channels: the least important go from between two convolutions, physically.

Which channels are free says the family: those that one convolution of a chain gives and the next alone reads.
What blocks add up (the residual stream) has one width for all blocks of a stage, and is left alone.

Shapes: S, T = channels in and out of a convolution, D = its taps, C = channels between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from smelt.compress.float_model import load_float, stored_parameters
from smelt.compress.prune.across import kept_across
from smelt.compress.prune.fit import channels_kept, check_units
from smelt.compress.prune.importance.of_units import on_labelled_rows
from smelt.compress.prune.importance.scores import Scores
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.train.objective import label_objective
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.core.stage import Context
from smelt.families.registry import family_of
from smelt.runtime.images.processor import USUAL_SIDE, read_processor
from smelt.runtime.layers.low_rank_conv import LowRankConv, ends_of, resized
from smelt.runtime.models.structure import Edit, replace_layer


@dataclass(frozen=True)
class ChannelGroup:
    """The channels between two convolutions: `first` gives them, `norm` norms them, `second` reads them.

    All three are dotted names in the model; name: what holds the first two.
    """

    name: str
    first: str
    norm: str
    second: str

    def count(self, model: nn.Module) -> int:
        """Return the number of channels."""
        return _convolution(model, ends_of(model, self.first)[1]).out_channels


def prune_channels(src: Artifact, settings: PruneSettings, ctx: Context) -> None:
    """Take the least important channels out of `src`, and write the model to `ctx.out`.

    Raises:
        InputError: a model without such channels, or rows that are missing.
    """
    from smelt.runtime.models.checkpoint import save_model

    model, edits = load_float(src, "prune")
    for one in check_units(settings.targets, model.config.to_dict()):
        raise InputError(f"prune: {one.message}", code=one.code, setting=one.setting)
    size = read_processor(src.path).shape or (USUAL_SIDE, USUAL_SIDE)
    ctx.details["parameters_before"] = stored_parameters(model)
    ctx.details["flops_before"] = operations_of(model, size)
    groups = find_channels(model)
    scores = _scores(model, groups, src, settings, ctx)
    kept = _kept(model, groups, scores, settings)
    ctx.warnings.extend(_not_as_asked(model, groups, kept, settings))
    for group in groups:
        if kept[group.name] < group.count(model):
            stay = scores[group.name].topk(kept[group.name]).indices.sort().values
            cut_channels(model, edits, group, stay)
    ctx.details["kept_channels"] = kept
    ctx.details["parameters_after"] = stored_parameters(model)
    ctx.details["flops_after"] = operations_of(model, size)
    ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))


def find_channels(model: Any) -> list[ChannelGroup]:
    """Return the channels of `model` that can go, in order."""
    family = family_of(model)
    assert family is not None
    assert family.normed is not None
    convolution, norm = family.normed
    found = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == family.chain:
            places = [f"{name}.{number}" for number, _ in module.named_children()]
            found += [
                ChannelGroup(one, f"{one}.{convolution}", f"{one}.{norm}", f"{following}.{convolution}")
                for one, following in pairwise(places)
            ]
    return found


def cut_channels(model: Any, edits: list[Edit], group: ChannelGroup, stay: Tensor) -> None:
    """Keep the channels `stay` (int64, rising) of `group`: of both convolutions and of the norm."""
    for path, dim in ((ends_of(model, group.first)[1], 0), (ends_of(model, group.second)[0], 1)):
        old = _convolution(model, path)
        weight = old.weight.detach().index_select(dim, stay)
        new = resized(old, weight.shape[1], weight.shape[0])
        new.weight = nn.Parameter(weight)
        if old.bias is not None:
            bias = old.bias.detach()
            new.bias = nn.Parameter(bias[stay] if dim == 0 else bias.clone())
        sizes = {"in_channels": new.in_channels, "out_channels": new.out_channels}
        replace_layer(model, edits, path, new.train(old.training), {"op": "conv", "module": path, **sizes})
    norm: Any = model.get_submodule(group.norm)
    smaller = nn.BatchNorm2d(len(stay), norm.eps, norm.momentum)
    smaller.load_state_dict({n: t[stay] if t.dim() else t for n, t in norm.state_dict().items()})
    edit = {"op": "batch_norm", "module": group.norm, "num_features": len(stay)}
    replace_layer(model, edits, group.norm, smaller.train(norm.training), edit)


def magnitude_of_filters(model: Any, groups: Sequence[ChannelGroup]) -> dict[str, Tensor]:
    """Score every channel by the L1 norm of the filter that gives it, float64 [C].

    Source: Li et al. 2017, Pruning Filters for Efficient ConvNets, arXiv:1608.08710, section 3.1.
    """
    return {
        g.name: kernel_of(model.get_submodule(g.first)).double().abs().flatten(1).sum(dim=1) for g in groups
    }


def gate_scores(
    model: Any,
    groups: Sequence[ChannelGroup],
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> dict[str, Tensor]:
    """Score every channel by (dL/dg)^2 of a gate g = 1 behind its batch norm, the mean over batches.

    The first-order change of the loss when the channel goes, squared. Layers can be compared as they are.
    Source: Molchanov et al. 2019, Importance Estimation for Neural Network Pruning, arXiv:1906.10771,
    equation 8 and section 3.2 (gates).

    Args:
        model: in eval mode, on any device.
        groups: what to score.
        batches: of labelled images, on that device.
        loss_of: the mean loss of model and batch.
    """
    there = next(model.parameters()).device
    gates = {g.name: torch.ones(g.count(model), requires_grad=True, device=there) for g in groups}
    hooks = [model.get_submodule(g.norm).register_forward_hook(_gated(gates[g.name])) for g in groups]
    found = {name: torch.zeros(len(gate), dtype=torch.float64) for name, gate in gates.items()}
    count = 0
    try:
        for batch in batches:
            slopes = torch.autograd.grad(loss_of(model, batch), list(gates.values()))
            for name, slope in zip(gates, slopes, strict=True):
                found[name] += slope.double().square().cpu()
            count += 1
    finally:
        for hook in hooks:
            hook.remove()
    return {name: total / max(1, count) for name, total in found.items()}


def kernel_of(module: nn.Module) -> Tensor:
    """Return the kernel of a convolution, or of thinner ones that stand for it, float [T, S, D, D]."""
    if not isinstance(module, LowRankConv):
        return module.get_parameter("weight").detach()
    first, *others = (step for step in module.steps if isinstance(step, nn.Conv2d))
    whole = first.weight.detach()
    for step in others:
        weight, alone = step.weight.detach(), step.groups != 1
        # in each direction one of the two has a single tap
        by = "oij,oskl->osikjl" if alone else "ocij,cskl->osikjl"
        product: Tensor = torch.einsum(by, weight[:, 0] if alone else weight, whole)
        whole = product.flatten(4, 5).flatten(2, 3)
    return whole


@torch.inference_mode()
def operations_of(model: Any, size: tuple[int, int]) -> int:
    """Return the multiplications of convolutions and linear layers for one image of `size`."""
    counter: Any = FlopCounterMode(display=False)
    with counter:
        model(pixel_values=torch.zeros(1, 3, *size))
    return int(counter.get_total_flops()) // 2


def _scores(
    model: Any, groups: Sequence[ChannelGroup], src: Artifact, settings: PruneSettings, ctx: Context
) -> dict[str, Tensor]:
    if settings.importance == "magnitude":
        return magnitude_of_filters(model, groups)
    if settings.importance == "random":
        draw = torch.Generator().manual_seed(ctx.seed)
        return {g.name: torch.rand(g.count(model), generator=draw, dtype=torch.float64) for g in groups}
    return on_labelled_rows(
        model, src, settings, ctx, lambda batches: gate_scores(model, groups, batches, label_objective())
    )


def _kept(
    model: Any, groups: Sequence[ChannelGroup], scores: Mapping[str, Tensor], settings: PruneSettings
) -> dict[str, int]:
    """Return by the name of a group how many of its channels stay."""
    if settings.scope == "global":
        among = Scores({}, dict(scores), comparable=settings.importance != "magnitude").across_layers()
        return kept_across(among.neurons, settings.ratio("channels"), settings.multiple_of)
    return {group.name: channels_kept(group.count(model), settings) for group in groups}


def _not_as_asked(
    model: Any, groups: Sequence[ChannelGroup], kept: Mapping[str, int], settings: PruneSettings
) -> list[Message]:
    """Say where all channels stay though some were to go: so few cannot be divided so."""
    whole = [g.count(model) for g in groups if kept[g.name] == g.count(model)]
    if settings.scope == "global" or settings.ratio("channels") == 1 or not whole:
        return []
    few = " or ".join(map(str, sorted(set(whole))))
    return [
        warning(
            "nothing-to-remove",
            f"keep_ratio {settings.ratio('channels'):g} of {few} channels, rounded to a multiple of"
            f" {settings.multiple_of}, keeps"
            f" all of them: nothing is removed in {len(whole)} of {len(groups)} layers. Lower keep_ratio or"
            " multiple_of.",
            setting="keep_ratio",
        )
    ]


def _gated(gate: Tensor) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda module, inputs, output: output * gate[:, None, None]


def _convolution(model: nn.Module, path: str) -> nn.Conv2d:
    found = model.get_submodule(path)
    assert isinstance(found, nn.Conv2d)
    return found
