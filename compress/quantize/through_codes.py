"""Training through the codes: float weights behind the layers of a quantized model.

While a quantized model trains, each of its layers computes with what its codes would stand for, and the
gradient goes to float weights behind them (straight-through, see the scheme's file). Afterwards codes
and scales are decided once more. Biases, norms and layers that stayed float train as ever.

The float weights start from those that the training before this one kept beside its codes; else from those
that were quantized, which the step before `quantize` still holds, so that a weight near a boundary may cross
it soon; where that step cannot be had or has other scales (AWQ), from what the codes stand for. Afterwards
they are kept beside the model (training/kept.py), and are no part of it.

Scales are found anew from the weights in each update, or learned with them (training/steps.py).

What is fake-quantized: weights in every scheme; activations where the scheme says so. The int8 blocks of
activations of MatMulNBits move a product by 0.6 % of its spread, weights of 4 bits by 10 % and more: there
they stay whole.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.quantize.coding import coded_bits, fake, fake_activations, fill_, round_to_nearest
from smelt.compress.quantize.settings import SCALING
from smelt.compress.quantize.smooth import follow
from smelt.compress.quantize.training.kept import read_latents, write_latents
from smelt.compress.quantize.training.steps import Steps
from smelt.compress.quantize.training.straight_through import straight_through
from smelt.compress.train.settings import TrainingSettings
from smelt.core.artifact import Artifact
from smelt.core.stage import Context
from smelt.runtime.layers.adapted import AdaptedLinear
from smelt.runtime.layers.matrix import Matrix
from smelt.runtime.layers.quantized import (
    Quantized,
    QuantizedEmbedding,
    QuantizedLinear,
    is_quantized,
    keep_scale,
)
from smelt.runtime.layers.quantized_conv import QuantizedConv2d
from smelt.runtime.models.checkpoint import load_model, save_model
from smelt.runtime.models.edits.fold_norms import fold_batch_norms
from smelt.runtime.models.stored_dtype import stored_types
from smelt.runtime.models.structure import Edit, keep_zeros, keeps_zeros, replace_module


class LatentLinear(nn.Linear):
    """Float weights that compute as the quantized layer `home` would with codes decided from them.

    untrained: no update was kept, so the integers of `home` are the layer's. as_came: compute with these.
    """

    def __init__(self, home: QuantizedLinear, weight: nn.Parameter) -> None:
        super().__init__(home.in_features, home.out_features, home.bias is not None, device="meta")
        self.weight = weight
        if home.bias is not None:
            self.bias = nn.Parameter(home.bias.detach().clone())
        self._home = [home]  # in a list: it is no part of what trains
        self._steps: list[Steps] = []
        self.untrained, self.as_came = True, False

    @property
    def steps(self) -> Steps | None:
        """The scales that are learned, where they are."""
        return self._steps[0] if self._steps else None

    def learn(self, steps: Steps) -> None:
        """Compute with `steps` from now on."""
        self._steps[:] = [steps]

    @property
    def home(self) -> QuantizedLinear:
        """The quantized layer, which comes back after the training."""
        return self._home[0]

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        if self.as_came:
            x = fake_activations(x, self.home.matrix)
            return F.linear(x, self.home.matrix.dequantize(), self.bias)
        if self.steps is not None:
            return F.linear(self.steps.seen(x), self.steps.fake(self.weight), self.bias)
        x = fake_activations(x, self.home.matrix)
        return F.linear(x, fake(self.weight, self.home.matrix), self.bias)


class LatentConv2d(nn.Module):
    """A float kernel that computes as the quantized convolution `home` would with codes decided from it.

    What the layer reads is rounded to the range that was found on rows, also where scales are learned.
    """

    def __init__(self, home: QuantizedConv2d, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None if home.bias is None else nn.Parameter(home.bias.detach().clone())
        self._home = [home]
        self._steps: list[Steps] = []
        self.untrained, self.as_came = True, False

    @property
    def steps(self) -> Steps | None:
        """The scales that are learned, where they are."""
        return self._steps[0] if self._steps else None

    def learn(self, steps: Steps) -> None:
        """Compute with `steps` from now on."""
        self._steps[:] = [steps]

    @property
    def home(self) -> QuantizedConv2d:
        """The quantized layer, which comes back after the training."""
        return self._home[0]

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, h, w] to [B, T, h', w']."""
        home, steps = self.home, self.steps
        with torch.no_grad():
            seen = home.seen(x)
        x = straight_through(x, seen)
        if self.as_came:
            return home.convolve(x, home.matrix.dequantize(), self.bias)
        weight = fake(self.weight, home.matrix) if steps is None else steps.fake(self.weight)
        return home.convolve(x, weight, self.bias)


class LatentEmbedding(nn.Embedding):
    """Float rows that are looked up as the quantized embedding `home` would hold them."""

    def __init__(self, home: QuantizedEmbedding, weight: nn.Parameter) -> None:
        super().__init__(home.num_embeddings, home.embedding_dim, home.padding_idx, device="meta")
        self.weight = weight
        self._home = [home]
        self._steps: list[Steps] = []
        self.untrained, self.as_came = True, False

    @property
    def steps(self) -> Steps | None:
        """The scales that are learned, where they are."""
        return self._steps[0] if self._steps else None

    def learn(self, steps: Steps) -> None:
        """Compute with `steps` from now on."""
        self._steps[:] = [steps]

    @property
    def home(self) -> QuantizedEmbedding:
        """The quantized embedding, which comes back after the training."""
        return self._home[0]

    def forward(self, input: Tensor) -> Tensor:
        """Map int64 [...] to [..., D]; where rows are decided alone, only those that are looked up."""
        matrix, steps = self.home.matrix, self.steps
        if self.as_came:
            return F.embedding(input, matrix.dequantize(), self.padding_idx)
        if not matrix.decided_by_row():
            whole = fake(self.weight, matrix) if steps is None else steps.fake(self.weight)
            return F.embedding(input, whole, self.padding_idx)
        ids = input.flatten()
        rows = F.embedding(ids, self.weight, self.padding_idx)
        found = fake(rows, matrix) if steps is None else steps.fake(rows, ids)
        return found.reshape(*input.shape, self.embedding_dim)


Latent: TypeAlias = LatentLinear | LatentConv2d | LatentEmbedding


def trains_few_bits(model: nn.Module) -> bool:
    """Return whether most weights that train through codes have fewer than four bits.

    A matrix that several layers share counts once.
    """
    matrices = {id(m.home.matrix): m.home.matrix for m in model.modules() if isinstance(m, Latent)}
    weights = [(matrix.scheme, len(matrix.codes) * matrix.width) for matrix in matrices.values()]
    few = sum(count for scheme, count in weights if scheme.trained or 0 < scheme.bits < 4)
    return 2 * few > sum(count for _, count in weights)


def load_trainable(src: Artifact, ctx: Context, adapters: bool = False) -> tuple[Any, list[Edit]]:
    """Return the model of `src` (float32, CPU, eval mode), ready to train, and its edits.

    A quantized model gets float weights behind its codes; `settle` takes them away again. Where `adapters`
    train, codes stay what they are.
    """
    model, edits = load_model(src.path)
    if not adapters and any(edit.get("op") == "quantize" for edit in edits):
        kept, doubt = read_latents(src.path, _shapes(model))
        if doubt is not None:
            ctx.warnings.append(doubt)
        if kept is not None:
            ctx.details["latent_weights"] = "kept"
            put_latent(model, None, kept)
            return model, edits
        found = _float_parent(src, ctx.ancestors)
        ctx.details["latent_weights"] = found[0] if found else "codes"
        floats = load_model(found[1].path)[0] if found else None
        if floats is not None:
            if any(edit.get("op") == "fold" for edit in edits):
                fold_batch_norms(floats)
            follow(floats, model)
        put_latent(model, floats)
    return model, edits


def float_weights(model: nn.Module, src: Artifact, ctx: Context, of_parent: bool) -> dict[int, Tensor] | None:
    """Return the float weights behind the codes of `model`, float32 [N, K], by the identity of the matrix.

    Args:
        model: of `src`, quantized.
        src: whose training may have kept them.
        ctx: the stage's.
        of_parent: whether those of the step before `quantize` will do.

    Returns:
        None where they are not known.
    """
    kept, doubt = read_latents(src.path, _shapes(model))
    if doubt is not None:
        ctx.warnings.append(doubt)
    parent = _float_parent(src, ctx.ancestors) if kept is None and of_parent else None
    floats = load_model(parent[1].path)[0] if parent else None
    if kept is None and floats is None:
        return None
    if floats is not None:
        follow(floats, model)
    found: dict[int, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_quantized(module) and id(module.matrix) not in found:
            weight = kept[name] if kept is not None else _weight(cast(nn.Module, floats), model, name)
            found[id(module.matrix)] = weight.detach().float()
    return found


def _float_parent(src: Artifact, ancestors: Mapping[str, Artifact]) -> tuple[str, Artifact] | None:
    """Return name and artifact of what was quantized into `src`, if that is how `src` was made."""
    if src.manifest.stage != "quantize" or src.manifest.settings.get("method") in SCALING:
        return None  # whose columns and rows have scales that nothing else tells
    return next(((n, a) for n, a in ancestors.items() if a.key == src.manifest.parent), None)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return (N, K) of each quantized matrix, by the first name of a layer with it."""
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_quantized(module):
            found.setdefault(id(module.matrix), (name, (len(module.matrix.codes), module.matrix.width)))
    return dict(found.values())


def put_latent(model: nn.Module, floats: nn.Module | None, kept: Mapping[str, Tensor] | None = None) -> None:
    """Put float weights behind every quantized layer of `model`, in place.

    Args:
        model: layers that share a matrix will share the float weights too.
        floats: the model before it was quantized, whose modules have the same names; None to start from
            what the codes stand for.
        kept: float32 [N, K] by the first name of each matrix: where a training before left them.
    """
    weights: dict[int, nn.Parameter] = {}
    made: dict[int, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not is_quantized(module):
            continue
        if id(module.matrix) not in weights:
            if kept is not None:
                start = kept[name]
            else:
                start = module.matrix.dequantize() if floats is None else _weight(floats, model, name)
            start = start.detach().flatten(1).clone()
            if keeps_zeros(module):  # what was kept has them, and else each code of 0 is one that lasts
                start = start.masked_fill(module.matrix.dequantize() == 0, 0.0) if kept is None else start
            weights[id(module.matrix)] = nn.Parameter(start)
        weight = weights[id(module.matrix)]
        if id(module) not in made:
            kind: Any = LatentLinear if isinstance(module, QuantizedLinear) else LatentEmbedding
            kind = LatentConv2d if isinstance(module, QuantizedConv2d) else kind
            made[id(module)] = kind(module, weight)
            keep_scale(made[id(module)], module)
            if keeps_zeros(module):
                keep_zeros(made[id(module)])
        replace_module(model, name, made[id(module)].train(module.training))


def _weight(floats: nn.Module, model: nn.Module, name: str) -> Tensor:
    """Return what the codes of the layer `name` of `model` are to stand for, float32 [N, K].

    Beside a pair that is what the pair leaves.
    """
    owner, _, last = name.rpartition(".")
    beside = model.get_submodule(owner) if last == "coded" else None
    if isinstance(beside, AdaptedLinear):
        pair = beside.adapter
        return cast(Tensor, floats.get_submodule(owner).weight) - pair.up.weight @ pair.down.weight
    return cast(Tensor, floats.get_submodule(name).weight)


def save_trained(model: Any, edits: list[Edit], src: Path, settings: TrainingSettings, ctx: Context) -> None:
    """Write a trained model into `ctx.out`, its codes decided, and beside it the float weights behind them.

    `ctx.details["latent_bytes"]` says how large these are, `ctx.details["bits_per_weight"]` what codes take.

    Args:
        model: as `load_trainable` gave it, trained; afterwards its quantized layers are back.
        edits: its structure.
        src: the folder that says how weights are stored.
        settings: of the training.
        ctx: the stage's.
    """
    weights = settle(model, ctx)
    ctx.warnings.extend(save_model(model, edits, ctx.out, src, settings.dtype))
    if any(is_quantized(module) for module in model.modules()):
        ctx.details["bits_per_weight"] = coded_bits(model, stored_types(ctx.out).common.itemsize)
    if weights and settings.keeps_weights:
        ctx.details["latent_bytes"] = write_latents(weights, ctx.out)


def settle(model: nn.Module, ctx: Context) -> dict[str, Tensor]:
    """Decide codes and scales from the trained weights, and put the quantized layers back in place.

    `ctx.details["codes_changed"]` says which fraction of all codes is another than before.

    Returns:
        The float weights of each matrix, float32 [N, K], by the first name of a layer with it.
    """
    latents = latents_of(model)
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, latent in latents:
        weights.setdefault(id(latent.home.matrix), (name, latent.weight.detach()))
    before = {id(m.home.matrix): _codes(m.home.matrix) for _, m in latents}
    _put_back(model, latents, {name: latent.home for name, latent in latents})
    if latents:
        now = {id(m.home.matrix): _codes(m.home.matrix) for _, m in latents}
        changed = sum(int((now[place] != before[place]).sum()) for place in before)
        total = sum(codes.numel() for codes in before.values())
        ctx.details["codes_changed"] = round(changed / max(1, total), 4)
    return dict(weights.values())


@contextlib.contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """Let `model` meanwhile be what `settle` would make of it; the layers of before are not touched."""
    latents = latents_of(model)
    # in one copy, so that layers which share a matrix go on sharing it
    _put_back(model, latents, copy.deepcopy({name: latent.home for name, latent in latents}))
    try:
        yield
    finally:
        for name, latent in latents:
            replace_module(model, name, latent)


@contextlib.contextmanager
def incoming(model: nn.Module) -> Iterator[None]:
    """Let `model` meanwhile compute with the integers that it came with, as long as no training was kept."""
    latents = [latent for _, latent in latents_of(model) if latent.untrained]
    for latent in latents:
        latent.as_came = True
    try:
        yield
    finally:
        for latent in latents:
            latent.as_came = False


def take_training(model: nn.Module) -> None:
    """Note that the weights of `model` are those of a training: codes are decided from them from now on."""
    for _, latent in latents_of(model):
        latent.untrained = False


def latents_of(model: nn.Module) -> list[tuple[str, Latent]]:
    """Return the layers with float weights behind their codes, those that are shared under each name."""
    return [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Latent)
    ]


def _put_back(
    model: nn.Module,
    latents: list[tuple[str, Latent]],
    homes: Mapping[str, Quantized],
) -> None:
    """Fill `homes` from the weights of `latents` and put them in their places."""
    filled: set[int] = set()
    for name, latent in latents:
        home, steps = homes[name], latent.steps
        if id(home.matrix) not in filled and not (
            latent.untrained and (latent.as_came or home is latent.home)
        ):
            with torch.no_grad():
                fill_(home.matrix, latent.weight, round_to_nearest if steps is None else steps.coder())
                if steps is not None:
                    steps.put_range(home.matrix)
            filled.add(id(home.matrix))
        if isinstance(latent, LatentEmbedding) or isinstance(home, QuantizedEmbedding):
            pass  # without a bias
        elif home.bias is not None and latent.bias is not None:
            home.bias.data = latent.bias.detach().clone()
        replace_module(model, name, home.train(latent.training))


def _codes(matrix: Matrix) -> Tensor:
    """Return the codes one by one."""
    return matrix.decided().codes.clone()
