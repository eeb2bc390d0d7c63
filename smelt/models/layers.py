"""Layers that structure edits put in the place of linear layers, convolutions and parts of blocks.

A layer can be the product of two smaller ones, a sequence of smaller convolutions, a linear layer with a
factor for each input, or a matrix shared by several layers with a low-rank difference of its own. An
attention or a feed-forward part can be replaced by a module that adds zero: x + f(x) becomes x.

Shapes: B = batch, K = inputs, N = outputs, S = input channels, T = output channels, h, w = height and width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.core.messages import with_article
from smelt.models.families.family import Family
from smelt.models.families.layout import Attention, Stack
from smelt.models.families.registry import SKIPPED_PARTS_ATTRIBUTE, family_of, skipped_parts
from smelt.quantization.layers import QuantizedLinear


class LowRankLinear(nn.Module):
    """y = up(down(x)): [in -> rank] without bias, then [rank -> out] with the layer's bias.

    Both halves are plain `nn.Linear` (named `down` and `up`), so that quantization finds them.
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(in_features, rank, bias=False)
        self.up = nn.Linear(rank, out_features, bias=bias)

    @property
    def in_features(self) -> int:
        """Return the width of the input; pruning may have changed it."""
        return self.down.in_features

    @property
    def out_features(self) -> int:
        """Return the width of the output; pruning may have changed it."""
        return self.up.out_features

    @property
    def rank(self) -> int:
        """Return the width between the two factors."""
        return self.down.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        out: Tensor = self.up(self.down(x))
        return out


class LowRankCorrectedLinear(nn.Module):
    """y = coded(x) + adapter(x), both [..., K] -> [..., N]; the bias is that of `coded`.

    The correction is a trained adapter (smelt/training/lora.py), or compensates quantization error
    (compress/quantize/low_rank_correction.py).

    The adapter that training added to quantized weights is kept separate. Merged, the sum would have to be
    quantized again, with an error as large as the one that the adapter was trained to compensate.
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, coded: QuantizedLinear, rank: int) -> None:
        """Add an adapter of a rank, with room for its weights, to `coded`, on the same device."""
        super().__init__()
        self.coded = coded
        low_rank = LowRankLinear(coded.in_features, coded.out_features, rank, bias=False)
        self.adapter = low_rank.to(coded.matrix.codes.device)

    @property
    def in_features(self) -> int:
        """Return K."""
        return self.coded.in_features

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.coded.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.coded(x) + self.adapter(x)
        return out


def with_low_rank_correction(quantized: QuantizedLinear, up: Tensor, down: Tensor) -> LowRankCorrectedLinear:
    """Return `quantized` with the correction `up`, float [N, r], and `down`, float [r, K], in its mode."""
    new = LowRankCorrectedLinear(quantized, len(down))
    new.adapter.up.weight.data, new.adapter.down.weight.data = up.detach().clone(), down.detach().clone()
    return new.train(quantized.training)


class LowRankEmbedding(nn.Module):
    """A narrow embedding, [V -> rank], projected to the model's width, [rank -> D], without bias.

    Source: the factorized embedding of ALBERT, Lan et al. 2020, arXiv:1909.11942, section 3.1. Both parts are
    plain modules (`table` and `up`), so that quantization finds them.
    """

    weight = None  # see LowRankLinear

    def __init__(self, words: int, width: int, rank: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(words, rank, padding_idx)
        self.up = nn.Linear(rank, width, bias=False)

    @property
    def num_embeddings(self) -> int:
        """Return the number of rows."""
        return self.table.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Return the width of the output."""
        return self.up.out_features

    @property
    def padding_idx(self) -> int | None:
        """Return the row of padding."""
        return self.table.padding_idx

    @property
    def rank(self) -> int:
        """Return the width of the table."""
        return self.table.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [...] to float [..., D]."""
        out: Tensor = self.up(self.table(ids))
        return out


class LowRankConv(nn.Module):
    """Convolutions in sequence, in the place of one: the last has its bias.

    `steps` are plain `nn.Conv2d`. Tucker-2 has three (1 x 1, D x D, 1 x 1; the first layer of a model two),
    CP has four (1 x 1, D x 1 and 1 x D channel by channel, 1 x 1).
    """

    def __init__(self, steps: Sequence[nn.Conv2d]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    @property
    def weight(self) -> Tensor:
        """Return the first one's weight, for its type: ViT reads the type of its patches' convolution."""
        weight: Tensor = self.steps[0].get_parameter("weight")
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Map float [B, S, h, w] to [B, T, h', w']."""
        for step in self.steps:
            x = step(x)
        return x


def conv_end_names(model: nn.Module, name: str) -> tuple[str, str]:
    """Return the names of the modules that read the inputs and give the outputs of the convolution `name`.

    They are its own name, or those of the first and the last of its factors.
    """
    module = model.get_submodule(name)
    if not isinstance(module, LowRankConv):
        return name, name
    return f"{name}.steps.0", f"{name}.steps.{len(module.steps) - 1}"


def make_conv_steps(kind: str, conv: nn.Conv2d, ranks: Sequence[int]) -> list[nn.Conv2d]:
    """Return the empty convolutions that replace `conv`, with its stride, padding, dilation and bias.

    Args:
        kind: tucker, with ranks (of the input channels, of the output channels), or (of the output channels)
            where the input channels are not factorized; cp, with one rank.
        conv: of one group, with zero padding.
        ranks: 1 or more.

    Raises:
        ValueError: the convolution or the ranks are not supported.
    """
    if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        raise ValueError("only ungrouped convolutions with numeric zero padding can be factorized")
    if min(ranks, default=0) < 1 or max(ranks) > max(conv.in_channels, conv.out_channels) * _kernel_size(
        conv
    ):
        raise ValueError(f"ranks {list(ranks)} are not valid for a {tuple(conv.weight.shape)} convolution")
    placement: dict[str, Any] = {"device": conv.weight.device, "dtype": conv.weight.dtype}
    shape: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    last: dict[str, Any] = {"bias": conv.bias is not None, **placement}
    size: Any = conv.kernel_size
    if kind == "cp" and len(ranks) == 1:
        [rank] = ranks
        defaults = {"stride": 1, "padding": 0, "dilation": 1}
        vertical: dict[str, Any] = {name: (value[0], defaults[name]) for name, value in shape.items()}
        horizontal: dict[str, Any] = {name: (defaults[name], value[1]) for name, value in shape.items()}
        return [
            nn.Conv2d(conv.in_channels, rank, 1, bias=False, **placement),
            nn.Conv2d(rank, rank, (size[0], 1), groups=rank, bias=False, **vertical, **placement),
            nn.Conv2d(rank, rank, (1, size[1]), groups=rank, bias=False, **horizontal, **placement),
            nn.Conv2d(rank, conv.out_channels, 1, **last),
        ]
    if kind == "tucker" and len(ranks) == 2:
        inner, outer = ranks
        return [
            nn.Conv2d(conv.in_channels, inner, 1, bias=False, **placement),
            nn.Conv2d(inner, outer, size, bias=False, **shape, **placement),
            nn.Conv2d(outer, conv.out_channels, 1, **last),
        ]
    if kind == "tucker" and len(ranks) == 1:
        return [
            nn.Conv2d(conv.in_channels, ranks[0], size, bias=False, **shape, **placement),
            nn.Conv2d(ranks[0], conv.out_channels, 1, **last),
        ]
    raise ValueError(f"unknown factorization '{kind[:40]}' with {len(ranks)} ranks")


def resize_conv(old: nn.Conv2d, in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return an empty convolution like `old`, of one group or depthwise, with other channels."""
    placement: dict[str, Any] = {"device": old.weight.device, "dtype": old.weight.dtype}
    shape: dict[str, Any] = {"stride": old.stride, "padding": old.padding, "dilation": old.dilation}
    size: Any = old.kernel_size
    shape |= {"groups": 1 if old.groups == 1 else in_channels, "padding_mode": old.padding_mode}
    return nn.Conv2d(in_channels, out_channels, size, bias=old.bias is not None, **shape, **placement)


def resize_batch_norm(old: nn.BatchNorm2d, num_features: int) -> nn.BatchNorm2d:
    """Return an empty batch norm like `old`, of its class, with other channels."""
    new = copy.deepcopy(old)
    new.num_features = num_features
    for name, tensor in [*old.named_parameters(recurse=False), *old.named_buffers(recurse=False)]:
        if tensor.dim():
            resized = tensor.detach().new_empty(num_features)
            setattr(new, name, nn.Parameter(resized) if isinstance(tensor, nn.Parameter) else resized)
    return new


def _kernel_size(conv: nn.Conv2d) -> int:
    return conv.kernel_size[0] * conv.kernel_size[1]


class ScaledLinear(nn.Module):
    """y = linear(x * factors).

    Where no preceding layer can absorb a scale (a residual sum also reads the norm, or a function that is not
    linear is between), the layer holds it itself, as in AWQ's published code (qmodule.py, ScaledActivation).

    linear: a plain `nn.Linear`, so that quantization finds it. factors: float32 [K].
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, linear: nn.Linear) -> None:
        """Add factors, all 1, before `linear`, on the same device."""
        super().__init__()
        self.linear = linear
        weight = linear.weight
        self.factors = nn.Parameter(torch.ones(linear.in_features, dtype=weight.dtype, device=weight.device))

    @property
    def in_features(self) -> int:
        """Return K."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.linear(x * self.factors)
        return out


class SharedLinear(nn.Module):
    """y = shared(x) + difference(x), both [..., K] -> [..., N].

    `shared` is one module in several layers, without bias; the difference is a low-rank product with the
    layer's bias. So each layer multiplies with a matrix of its own, W_shared + B A, at a small storage cost
    (Bae et al. 2024, Relaxed Recursive Transformers, arXiv:2410.20672, equation 3).
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.shared: nn.Module = nn.Linear(in_features, out_features, bias=False)
        self.difference = LowRankLinear(in_features, out_features, rank, bias)

    @property
    def in_features(self) -> int:
        """Return K."""
        return self.difference.in_features

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.difference.out_features

    @property
    def rank(self) -> int:
        """Return the rank of the difference."""
        return self.difference.rank

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.shared(x) + self.difference(x)
        return out


def component_layers(module: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Return the layers that `module`, called `name`, consists of, by their names; a plain one is its own."""
    if isinstance(module, SharedLinear):
        inner = f"{name}.difference".removeprefix(".")
        return component_layers(module.shared, f"{name}.shared".removeprefix(".")) | component_layers(
            module.difference, inner
        )
    if isinstance(module, LowRankLinear):
        return {f"{name}.{factor}".removeprefix("."): getattr(module, factor) for factor in ("down", "up")}
    return {name: module}


class SkippedSublayer(nn.Module):
    """Returns a zero [] of the type of its input; it has no parameters.

    results: number of outputs that a block expects: 1, or the 2 or 3 of an attention (the addend, the
    relative position bias that it was given where there are 3, and no weights). A zero without axes adds
    to states of any shape, and an exporter folds it: nothing of the part remains in a graph.
    """

    def __init__(self, results: int = 1) -> None:
        super().__init__()
        self.results = results

    def forward(self, hidden_states: Tensor, *unused: Any, **kwargs: Any) -> Any:
        """Return the zero; for an attention a tuple that begins with it."""
        zero = hidden_states.new_zeros(())
        if self.results == 1:
            return zero
        return (zero, None) if self.results == 2 else (zero, kwargs.get("position_bias"), None)

    def extra_repr(self) -> str:
        """Return the number of outputs, for printing."""
        return f"results={self.results}"


def skip_sublayer(model: Any, block_path: str, part: int) -> dict[str, Any]:
    """Remove a part from the block at `block_path` of `model`, in place; return the edit.

    The parts of a block are numbered: its attentions in order, then the feed-forward part. Where norms come
    first, the norm that only this part read is removed too; where they come after the sum, norm(x + f(x))
    becomes norm(x). The remaining attentions are renumbered for the cache of keys and values, so that it has
    an entry for each of them only. A relative position bias that the attention owned for all is moved to the
    next block. A block that is used in several places loses the part in all of them. Works on the meta
    device.

    Raises:
        InputError: it is the last of its kind in its stack.
        LookupError: there is no such block.
        ValueError: there is no such part, or it was already removed.
    """
    family, stack = _find_stack(model, block_path)
    block = model.get_submodule(block_path)
    skipped = skipped_parts(block)
    if type(part) is not int or not 0 <= part <= len(stack.attentions) or part in skipped:
        raise ValueError(f"the block {block_path} has no part {part!r} to remove")
    blocks = list(dict.fromkeys(stack.modules(model)))
    if not any(part not in skipped_parts(other_block) for other_block in blocks if other_block is not block):
        raise InputError(
            f"{block_path}: {with_article(sublayer_name(stack, part))} of the {stack.name} must be kept,"
            " because it is the last one.",
            code="last-layer",
        )
    if part < len(stack.attentions):
        _move_relative_bias(family, stack, blocks, block, part)
    _remove(block, stack, part)
    setattr(block, SKIPPED_PARTS_ATTRIBUTE, skipped | {part})
    renumber_caches(model, stack)
    return {"op": "skip", "module": block_path, "part": part}


def sublayer_name(stack: Stack, part: int) -> str:
    """Return the name of a part of the blocks of `stack` in settings: attention, cross-attention or ffn."""
    if part == len(stack.attentions):
        return "ffn"
    return "cross-attention" if stack.attentions[part].cross else "attention"


def renumber_caches(model: Any, stack: Stack) -> None:
    """Renumber the remaining attentions of each kind in `stack` from 0: their index in the cache."""
    blocks = list(dict.fromkeys(stack.modules(model)))
    if not any(skipped_parts(block) for block in blocks):
        return
    for index, attention in enumerate(stack.attentions):
        remaining_blocks = [block for block in blocks if index not in skipped_parts(block)]
        for number, block in enumerate(remaining_blocks):
            for module in block.get_submodule(attention.name).modules():
                if getattr(module, "layer_idx", None) is not None:
                    module.layer_idx = number


def _find_stack(model: Any, block_path: str) -> tuple[Family, Stack]:
    family = family_of(model)
    for stack in family.stacks(model.config.to_dict()) if family else ():
        if family and block_path in {
            f"{stack.module_path}.{index}" for index in range(len(model.get_submodule(stack.module_path)))
        }:
            return family, stack
    raise LookupError(f"the model has no block {block_path}")


def _move_relative_bias(family: Family, stack: Stack, blocks: list[Any], block: Any, part: int) -> None:
    """Move the relative position bias to the next block if this attention owns that of its stack."""
    remaining = [other_block for other_block in blocks if part not in skipped_parts(other_block)]
    if family.relative_bias and not stack.attentions[part].cross and remaining[0] is block:
        family.relative_bias().move_table(block, remaining[1])


def _remove(block: Any, stack: Stack, part: int) -> None:
    if part < len(stack.attentions):
        removed: Any = stack.attentions[part]
        results = 3 if removed.relative_bias == "handed_on" else 2
    else:
        removed, results = stack.feed_forward, 1
    if removed.name:
        _set_submodule(block, removed.name, SkippedSublayer(results))
    for layer in removed.linear_layers:
        if not (removed.name and layer.startswith(f"{removed.name}.")):
            _set_submodule(block, layer, SkippedSublayer())
    for norm in removed.qk_norms or () if isinstance(removed, Attention) else ():
        if not norm.startswith(f"{removed.name}."):
            _set_submodule(block, norm, nn.Identity())
    norms = stack.stream.part_norms if stack.stream.pre_norm else ()
    unused_norms = {name for index, name in enumerate(norms) if index == part} - {
        name for index, name in enumerate(norms) if index not in skipped_parts(block) | {part}
    }
    for name in (*unused_norms, *stack.stream.output_norms[part : part + 1]):
        _set_submodule(block, name, nn.Identity())


def _set_submodule(block: Any, name: str, new: nn.Module) -> None:
    parent_name, _, last = name.rpartition(".")
    setattr(block.get_submodule(parent_name), last, new)
