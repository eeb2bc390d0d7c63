"""Pruning of convolution channels: importance scores, and physical removal between two convolutions.

The model family defines which channels can be removed: the outputs of one convolution of a chain that only
the next one reads. The residual stream has one width for all blocks of a stage and is not pruned. The scores
of the channels of hidden states, for the width, are computed here too.

Shapes: S, T = channels in and out of a convolution, D = its taps, C = channels between two of them. Of hidden
states: B = batch, S = tokens, D = channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from smelt.calibration.samples import model_outputs
from smelt.compress.model_input import load_float_model
from smelt.compress.prune.importance import ScoredModel, UnitScores, score_on_labelled_samples
from smelt.compress.prune.settings import PruneSettings, check_units, count_kept_channels
from smelt.compress.prune.units import allocate_globally
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.core.stage import Context
from smelt.models.checkpoint import count_stored_parameters
from smelt.models.edits import Edit, replace_layer
from smelt.models.families.registry import family_of, model_attentions, norm_consumers
from smelt.models.hidden_width import hidden_axes
from smelt.models.layers import LowRankConv, conv_end_names, resize_conv
from smelt.models.model_size import count_macs
from smelt.runtimes.images import DEFAULT_IMAGE_SIZE, read_processor
from smelt.training.losses import label_objective
from smelt.training.samples import TensorBatch


@dataclass(frozen=True)
class ChannelGroup:
    """The channels between two convolutions: `first` outputs, `norm` normalizes and `second` reads them.

    All three are dotted names in the model. name: the module that holds `first` and `norm`.
    """

    name: str
    first: str
    norm: str
    second: str

    def count(self, model: nn.Module) -> int:
        """Return the number of channels."""
        return _find_convolution(model, conv_end_names(model, self.first)[1]).out_channels


def prune_channels(src: Artifact, settings: PruneSettings, ctx: Context) -> None:
    """Remove the least important channels of `src`, and write the model to `ctx.out`.

    Raises:
        InputError: the model has no such channels, or calibration samples are missing.
    """
    from smelt.models.checkpoint import save_model

    model, edits = load_float_model(src, "prune")
    for mistake in check_units(settings.targets, model.config.to_dict()):
        raise InputError(f"prune: {mistake.message}", code=mistake.code, setting=mistake.setting)
    size = read_processor(src.path).shape or (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE)
    ctx.details["parameters_before"] = count_stored_parameters(model)
    ctx.details["flops_before"] = count_macs(model, size)
    groups = find_channels(model)
    scores = CHANNEL_SCORES[settings.importance](ScoredModel(model, src, settings, ctx), groups)
    kept = _kept_counts(model, groups, scores, settings)
    ctx.warnings.extend(_rounding_warnings(model, groups, kept, settings))
    for group in groups:
        if kept[group.name] < group.count(model):
            stay = scores.neurons[group.name].topk(kept[group.name]).indices.sort().values
            cut_channels(model, edits, group, stay)
    ctx.details["kept_channels"] = kept
    ctx.details["parameters_after"] = count_stored_parameters(model)
    ctx.details["flops_after"] = count_macs(model, size)
    ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))


def find_channels(model: Any) -> list[ChannelGroup]:
    """Return the channel groups of `model` that can be pruned, in order."""
    family = family_of(model)
    assert family is not None
    assert family.conv_and_norm is not None
    convolution, norm = family.conv_and_norm
    found = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == family.conv_chain:
            places = [f"{name}.{number}" for number, _ in module.named_children()]
            found += [
                ChannelGroup(block, f"{block}.{convolution}", f"{block}.{norm}", f"{following}.{convolution}")
                for block, following in pairwise(places)
            ]
    return found


def cut_channels(model: Any, edits: list[Edit], group: ChannelGroup, kept: Tensor) -> None:
    """Keep the channels `kept` (int64, ascending) of `group`, in both convolutions and the norm."""
    for path, dim in (
        (conv_end_names(model, group.first)[1], 0),
        (conv_end_names(model, group.second)[0], 1),
    ):
        old = _find_convolution(model, path)
        weight = old.weight.detach().index_select(dim, kept)
        new = resize_conv(old, weight.shape[1], weight.shape[0])
        new.weight = nn.Parameter(weight)
        if old.bias is not None:
            bias = old.bias.detach()
            new.bias = nn.Parameter(bias[kept] if dim == 0 else bias.clone())
        sizes = {"in_channels": new.in_channels, "out_channels": new.out_channels}
        replace_layer(model, edits, path, new.train(old.training), {"op": "conv", "module": path, **sizes})
    norm: Any = model.get_submodule(group.norm)
    smaller = nn.BatchNorm2d(len(kept), norm.eps, norm.momentum)
    smaller.load_state_dict({n: t[kept] if t.dim() else t for n, t in norm.state_dict().items()})
    edit = {"op": "batch_norm", "module": group.norm, "num_features": len(kept)}
    replace_layer(model, edits, group.norm, smaller.train(norm.training), edit)


def filter_magnitudes(model: Any, groups: Sequence[ChannelGroup]) -> dict[str, Tensor]:
    """Return the L1 norm of the filter of every channel, float64 [C] by group.

    Source: Li et al. 2017, Pruning Filters for Efficient ConvNets, arXiv:1608.08710, section 3.1.
    """
    return {
        g.name: whole_kernel(model.get_submodule(g.first)).double().abs().flatten(1).sum(dim=1)
        for g in groups
    }


def gate_scores(
    model: Any,
    groups: Sequence[ChannelGroup],
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> dict[str, Tensor]:
    """Return the mean over batches of (dL/dg)^2 for a gate g = 1 after each channel's batch norm.

    This is the squared first-order change of the loss when the channel is removed. Scores are comparable
    between layers.
    Source: Molchanov et al. 2019, Importance Estimation for Neural Network Pruning, arXiv:1906.10771,
    equation 8 and section 3.2 (gates).

    Args:
        model: in eval mode, on any device.
        groups: the channel groups to score.
        batches: labelled images, on the same device.
        loss_of: returns the mean loss of a model on a batch.
    """
    device = next(model.parameters()).device
    gates = {g.name: torch.ones(g.count(model), requires_grad=True, device=device) for g in groups}
    hooks = [model.get_submodule(g.norm).register_forward_hook(_gate_hook(gates[g.name])) for g in groups]
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


def whole_kernel(module: nn.Module) -> Tensor:
    """Return the kernel of a convolution, or the product of a factorized one's, float [T, S, D, D]."""
    if not isinstance(module, LowRankConv):
        return module.get_parameter("weight").detach()
    first, *following = (step for step in module.steps if isinstance(step, nn.Conv2d))
    whole = first.weight.detach()
    for step in following:
        weight, alone = step.weight.detach(), step.groups != 1
        # in each direction one of the two has a single tap
        by = "oij,oskl->osikjl" if alone else "ocij,cskl->osikjl"
        product: Tensor = torch.einsum(by, weight[:, 0] if alone else weight, whole)
        whole = product.flatten(4, 5).flatten(2, 3)
    return whole


def _random_scores(model: Any, groups: Sequence[ChannelGroup], seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {g.name: torch.rand(g.count(model), generator=draw, dtype=torch.float64) for g in groups}


def _gradient_scores(squared: bool) -> Callable[[ScoredModel, Sequence[ChannelGroup]], UnitScores]:
    def score(scored: ScoredModel, groups: Sequence[ChannelGroup]) -> UnitScores:
        found = score_on_labelled_samples(
            scored,
            lambda batches: gate_scores(scored.model, groups, batches, label_objective()),
            single=squared,
        )
        return UnitScores({}, found, comparable_across_layers=True)

    return score


# By importance: a function that returns the scores of channels, as those of neurons.
CHANNEL_SCORES: Mapping[str, Callable[[ScoredModel, Sequence[ChannelGroup]], UnitScores]] = {
    "taylor": _gradient_scores(squared=False),
    "fisher": _gradient_scores(squared=True),
    "magnitude": lambda scored, groups: UnitScores({}, filter_magnitudes(scored.model, groups)),
    "random": lambda scored, groups: UnitScores(
        {}, _random_scores(scored.model, groups, scored.ctx.seed), comparable_across_layers=True
    ),
}


def _kept_counts(
    model: Any, groups: Sequence[ChannelGroup], scores: UnitScores, settings: PruneSettings
) -> dict[str, int]:
    """Return the number of kept channels by group name."""
    if settings.scope == "global":
        among = scores.normalized()
        return allocate_globally(among.neurons, settings.keep_ratio_of("channels"), settings.multiple_of)
    return {group.name: count_kept_channels(group.count(model), settings) for group in groups}


def _rounding_warnings(
    model: Any, groups: Sequence[ChannelGroup], kept: Mapping[str, int], settings: PruneSettings
) -> list[Message]:
    """Return a warning about layers that keep all channels because of rounding."""
    whole = [g.count(model) for g in groups if kept[g.name] == g.count(model)]
    if settings.scope == "global" or settings.keep_ratio_of("channels") == 1 or not whole:
        return []
    few = " or ".join(map(str, sorted(set(whole))))
    return [
        warning(
            "nothing-to-remove",
            f"keep_ratio {settings.keep_ratio_of('channels'):g} of {few} channels, rounded to a multiple of"
            f" {settings.multiple_of}, keeps all of them: nothing is removed in {len(whole)} of"
            f" {len(groups)} layers. Lower keep_ratio or multiple_of.",
            setting="keep_ratio",
        )
    ]


def _gate_hook(gate: Tensor) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda module, inputs, output: output * gate[:, None, None]


def _find_convolution(model: nn.Module, path: str) -> nn.Conv2d:
    found = model.get_submodule(path)
    assert isinstance(found, nn.Conv2d)
    return found


def hidden_norms(model: Any) -> list[nn.Module]:
    """Return the norms of the hidden states of `model`, each once, in the order of computation."""
    family: Any = family_of(model)
    of_heads = {norm for attention in model_attentions(model) for norm in attention.qk_norms or ()}
    names = [feed.norm for feed in norm_consumers(model) if feed.norm not in of_heads]
    return [model.get_submodule(name) for name in names if name not in family.head_modules]


def activation_scores(model: Any, width: int, batches: Iterable[TensorBatch]) -> Tensor:
    """Return the activation magnitude of each channel at the norm outputs, float64 [D].

    The sum over norms of the L2 norm over samples of the mean over tokens of |y|, with y the norm output.
    Source: Muralidharan et al. 2024, Compact Language Models via Pruning and Knowledge Distillation
    (Minitron), arXiv:2407.14679, section 2.2, aggregated by mean over tokens and L2 over samples.

    Args:
        model: in eval mode.
        width: D.
        batches: inputs without padding, on the device of the model.
    """
    squares: dict[nn.Module, Tensor] = {}
    sizes: list[int] = []

    def counted() -> Iterator[TensorBatch]:
        for batch in batches:
            sizes.append(len(next(iter(batch.values()))))
            yield batch

    def see(norm: nn.Module, _: Any, result: Tensor) -> None:
        # [B, ..., D], or [B S, D] if the model flattens its states
        by_row = result.double().abs().reshape(sizes[-1], -1, width)
        rows = by_row.mean(dim=1).square().sum(dim=0).cpu()
        squares[norm] = squares.get(norm, torch.zeros(width, dtype=torch.float64)) + rows

    handles = [norm.register_forward_hook(see) for norm in hidden_norms(model)]
    try:
        for _ in model_outputs(model, counted()):
            pass
    finally:
        for handle in handles:
            handle.remove()
    total = torch.zeros(width, dtype=torch.float64)
    for found in squares.values():
        total += found.sqrt()
    return total


def gradient_scores(
    model: Any,
    width: int,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    squared: bool,
) -> Tensor:
    """Return the importance of each channel by the gradient of a mask m = 1 on all norm outputs, float64 [D].

    The sum over batches of |dL/dm| (taylor), or their mean of (dL/dm)^2 if `squared` (fisher), as for heads
    and neurons.

    Args:
        model: in eval mode.
        width: D.
        batches: labelled samples, on the device of the model; one sample per batch if squared.
        loss_of: returns the mean loss of a model on a batch.
        squared: whether to compute fisher instead of taylor.
    """
    found, count = torch.zeros(width, dtype=torch.float64), 0
    with _hidden_mask(model, width) as mask:
        for batch in batches:
            (slope,) = torch.autograd.grad(loss_of(model, batch), [mask])
            found += (slope.double().square() if squared else slope.double().abs()).cpu()
            count += 1
    return found / max(1, count) if squared else found


@contextmanager
def _hidden_mask(model: Any, width: int) -> Iterator[Tensor]:
    mask = torch.ones(width, requires_grad=True, device=next(model.parameters()).device)
    handles = [norm.register_forward_hook(lambda m, x, y: y * mask) for norm in hidden_norms(model)]
    try:
        yield mask
    finally:
        for handle in handles:
            handle.remove()


def channel_magnitudes(model: Any) -> Tensor:
    """Return the L2 norm of all weights that read, output or normalize each channel, float64 [D]."""
    squares: list[Tensor] = []
    seen: set[tuple[str, int]] = set()
    for axis in hidden_axes(model):
        if axis.stream != "hidden" or (axis.name, axis.dim) in seen:
            continue
        seen.add((axis.name, axis.dim))
        owner, _, last = axis.name.rpartition(".")
        tensor: Tensor = getattr(model.get_submodule(owner), last)
        squares.append(tensor.detach().double().transpose(0, axis.dim).flatten(1).square().sum(dim=1)
                       if tensor.dim() > 1 else tensor.detach().double().square())  # fmt: skip
    return torch.stack(squares).sum(dim=0).sqrt()
