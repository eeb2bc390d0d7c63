"""The sparsity methods, which choose the weights to set to zero: at once, or gradually during training.

- magnitude: the smallest weights of a layer.
- random: a baseline for the other methods.
- SparseGPT: column by column, and the error is compensated in the columns to the right.
- Wanda: by the magnitude of a weight times the norm of its input.

Gradual: each linear layer computes with W * M. Before every update the mask M is computed from scores of the
weights, and the fraction of zeros rises from 0 along a cubic (Zhu & Gupta 2017, arXiv:1710.01878,
equation 1):

    s(t) = s_f (1 - (1 - (t - t0) / (t1 - t0))^3)            t0 <= t <= t1

- magnitude: scores |W|; a weight that is zero in W * M keeps its value in W and may return.
- movement: scores S are trained with a straight-through estimator for M, so that dL/dS = dL/dW' * W: they
  rise for weights that move away from zero (Sanh et al. 2020, arXiv:2005.07683, equation 2).
- soft-movement: M = 1 where sigmoid(S) > threshold; the threshold rises as s(t) does, a penalty on
  sigmoid(S) lowers the scores, and the fraction of zeros differs by layer (their section 3, and
  emmental/modules/binarizer.py: at least 0.5 % of a matrix are kept).

Shapes: N = outputs, K = inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.sequential import ObserveInputs
from smelt.calibration.statistics import (
    InputStatistics,
    StatisticsCollector,
    few_tokens_text,
    input_width,
    inverse_cholesky,
)
from smelt.compress.model_input import AFTER_QUANTIZE, TRAINING_BEFORE_QUANTIZE
from smelt.compress.sparsify.settings import GradualSparsitySettings, SparsityPattern, parse_pattern
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.models.edits import is_masked, mark_masked
from smelt.models.families.registry import Block, blocks_of
from smelt.models.layers import LowRankLinear, SharedLinear, component_layers
from smelt.training.extension import (
    LossTerm,
    LossTerms,
    Objective,
    ParameterGroup,
    TrainingExtension,
    as_loss_terms,
)

# Statistics of a layer's inputs that a method needs: none, norms, second moments.
RequiredStatistics = Literal["nothing", "norms", "moments"]


@dataclass(frozen=True)
class SparsityInput:
    """What a method gets of a linear layer.

    weight: float32 [N, K]. statistics: of its inputs; None if the method needs none. zeros: bool [N, K], the
    weights that are zero already and stay zero, which count in the pattern; None for a dense layer.
    """

    weight: Tensor
    statistics: InputStatistics | None = None
    zeros: Tensor | None = None


class SparsityMethod(Protocol):
    """Chooses the weights to set to zero, and may update the kept ones."""

    name: ClassVar[str]
    source: ClassVar[str]
    statistics: ClassVar[RequiredStatistics]

    def __call__(self, layer: SparsityInput, pattern: SparsityPattern, draw: Generator) -> Tensor:
        """Return the new weight, float32 [N, K], with zeros by `pattern`.

        Args:
            layer: weight and statistics of a linear layer.
            pattern: number and positions of zeros.
            draw: generator of random numbers.
        """


class MagnitudeSparsity:
    """Compares |W| in a whole layer (Han et al. 2015; the baseline of Wanda's and SparseGPT's papers)."""

    name: ClassVar[str] = "magnitude"
    source: ClassVar[str] = "magnitude: Han et al. 2015, arXiv:1506.02626"
    statistics: ClassVar[RequiredStatistics] = "nothing"

    def __call__(self, layer: SparsityInput, pattern: SparsityPattern, draw: Generator) -> Tensor:
        """Return the weight with zeros at its smallest magnitudes."""
        return layer.weight.masked_fill(pattern.zero_mask(layer.weight.abs(), "matrix", layer.zeros), 0.0)


class RandomSparsity:
    """Chooses the weights to remove at random, by the recipe's seed."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "random: a control"
    statistics: ClassVar[RequiredStatistics] = "nothing"

    def __call__(self, layer: SparsityInput, pattern: SparsityPattern, draw: Generator) -> Tensor:
        """Return the weight with zeros at random places."""
        scores = torch.rand(layer.weight.shape, generator=draw)
        return layer.weight.masked_fill(pattern.zero_mask(scores, "matrix", layer.zeros), 0.0)


_BLOCK_COLUMNS = 128  # per mask


class SparseGpt:
    """Processes the columns from left to right, as the published code does (sparsegpt.py).

    Frantar & Alistarh 2023, SparseGPT, arXiv:2301.00774. With H = 2 X X^T / tokens (an input that is always 0
    has 1 on the diagonal and loses its weights; 1 % of the mean diagonal is added) and U the upper Cholesky
    factor of its inverse, the importance of a weight is w^2 / U_jj^2. In blocks of 128 columns the least
    important weights are chosen, over all rows (n of m: inside each group, when it is reached); then for each
    column the error of the removed weights, divided by U_jj, is compensated in the columns to its right along
    U's row. Zeros of before are removed weights too: what they would get as compensation is passed on.
    """

    name: ClassVar[str] = "sparsegpt"
    source: ClassVar[str] = "sparsegpt: Frantar & Alistarh 2023, arXiv:2301.00774"
    statistics: ClassVar[RequiredStatistics] = "moments"

    def __call__(self, layer: SparsityInput, pattern: SparsityPattern, draw: Generator) -> Tensor:
        """Return the weight with zeros and with compensated kept weights."""
        assert layer.statistics is not None
        assert layer.statistics.second_moment is not None
        dead = layer.statistics.second_moment.diagonal() == 0
        factor = inverse_cholesky(layer.statistics)[0].to(layer.weight)
        new = layer.weight.clone()
        new[:, dead] = 0.0
        block_size = max(1, _BLOCK_COLUMNS // (pattern.group or 1)) * (pattern.group or 1)  # whole groups
        for start in range(0, new.shape[1], block_size):
            end = min(start + block_size, new.shape[1])
            held = None if layer.zeros is None else layer.zeros[:, start:end]
            errors = _sparsify_columns(new[:, start:end], factor[start:end, start:end], pattern, held)
            new[:, end:] -= errors @ factor[start:end, end:]
        return new


def _sparsify_columns(
    columns: Tensor, factor: Tensor, pattern: SparsityPattern, zeros: Tensor | None
) -> Tensor:
    """Sparsify some columns, float [N, C], in place; return the errors [N, C] to compensate."""
    weighing = factor.diagonal().square()
    errors = torch.zeros_like(columns)
    removed = torch.zeros_like(columns, dtype=torch.bool)
    if pattern.group is None:
        removed = pattern.zero_mask(columns.square() / weighing, "matrix", zeros)
    for column in range(columns.shape[1]):
        if pattern.group is not None and column % pattern.group == 0:
            part = slice(column, column + pattern.group)
            zeros_of_group = None if zeros is None else zeros[:, part]
            removed[:, part] = pattern.zero_mask(
                columns[:, part].square() / weighing[part], "row", zeros_of_group
            )
        removed_weights = columns[:, column].where(removed[:, column], torch.zeros(()))
        errors[:, column] = removed_weights / factor[column, column]
        columns[:, column:] -= errors[:, column : column + 1] * factor[column, column:]
        columns[:, column].masked_fill_(removed[:, column], 0.0)  # exactly zero, without rounding errors
    return errors


class Wanda:
    """Compares |W_ij| |X_j| inside each output's row, X_j being input j over all calibration tokens.

    Sun et al. 2024, A Simple and Effective Pruning Approach for Large Language Models, arXiv:2306.11695,
    equation 1. Kept weights are not updated.
    """

    name: ClassVar[str] = "wanda"
    source: ClassVar[str] = "wanda: Sun et al. 2024, arXiv:2306.11695"
    statistics: ClassVar[RequiredStatistics] = "norms"

    def __call__(self, layer: SparsityInput, pattern: SparsityPattern, draw: Generator) -> Tensor:
        """Return the weight with zeros at the smallest scores."""
        assert layer.statistics is not None
        scores = layer.weight.abs() * layer.statistics.l2_norms.to(layer.weight)
        return layer.weight.masked_fill(pattern.zero_mask(scores, "row", layer.zeros), 0.0)


def linear_layer_names(block: Block, targets: Collection[str]) -> list[str]:
    """Return the names of the linear layers in the selected parts of `block`, of any module type."""
    names = [n for part in block.attentions for n in part.linear_layers] if "attention" in targets else []
    feed = block.feed_forward if "ffn" in targets else None
    return names + list(feed.linear_layers if feed is not None else ())


def linear_layers(model: nn.Module, block: Block, targets: Collection[str]) -> dict[str, nn.Linear]:
    """Return the linear layers in the selected parts of `block` by name; of a composed one its parts."""
    found: dict[str, nn.Linear] = {}
    for name in linear_layer_names(block, targets):
        parts = component_layers(model.get_submodule(name), name)
        found |= {part: layer for part, layer in parts.items() if isinstance(layer, nn.Linear)}
    return found


class Sparsifier:
    """Makes layers sparse and counts zeros.

    Args:
        model: the model with the layers.
        method: chooses the zeros.
        pattern: number and positions of zeros.
        draw: generator of random numbers.
    """

    def __init__(
        self, model: nn.Module, method: SparsityMethod, pattern: SparsityPattern, draw: Generator
    ) -> None:
        self._model, self._method, self._pattern, self._draw = model, method, pattern, draw
        self._seen: set[nn.Module] = set()
        self._zeros: dict[str, float] = {}
        self._counts = [0, 0]  # zeros, weights
        self._odd: list[str] = []
        self._unreached: list[str] = []
        self._fed: list[tuple[int, int]] = []

    @torch.no_grad()
    def sparsify(self, layers: dict[str, nn.Linear], observe: ObserveInputs | None) -> None:
        """Make `layers` sparse in place, except those done before; `observe` provides their inputs."""
        new = {name: m for name, m in layers.items() if m not in self._seen}
        self._seen.update(new.values())
        self._odd += [name for name, m in new.items() if not self._pattern.fits(m.in_features)]
        fit = {name: m for name, m in new.items() if self._pattern.fits(m.in_features)}
        found = self._collect_statistics(fit, observe)
        for name, layer in fit.items():
            seen = found.pop(name, None)  # frees its second moment
            if seen is not None and not seen.tokens:
                self._unreached.append(name)
                continue
            if seen is not None:
                self._fed.append((seen.tokens, layer.in_features))
            weight = layer.weight.detach().float().cpu()
            zeros = weight == 0 if is_masked(layer) else None  # it is already sparse
            sparse = self._method(SparsityInput(weight, seen, zeros), self._pattern, self._draw)
            layer.weight.copy_(sparse)
            mark_masked(layer)
            num_zeros = int((layer.weight == 0).sum())
            self._counts = [self._counts[0] + num_zeros, self._counts[1] + weight.numel()]
            self._zeros[name] = round(num_zeros / weight.numel(), 4)

    def _collect_statistics(
        self, layers: dict[str, nn.Linear], observe: ObserveInputs | None
    ) -> dict[str, InputStatistics]:
        if observe is None or not layers:
            return {}
        widths = {name: input_width(layer) for name, layer in layers.items()}
        device = next(iter(layers.values())).weight.device.type
        collector = StatisticsCollector(widths, second=self._method.statistics == "moments", device=device)
        observe({name: [layer] for name, layer in layers.items()}, collector.update)
        for name, found in collector.statistics.items():
            if not bool(found.squares.isfinite().all()):
                raise InputError(
                    f"sparsify: {name}: the layer's inputs are not finite. The training before this"
                    " step has probably diverged; lower its learning_rate.",
                    code="non-finite-activations",
                )
        return {name: found.to("cpu") for name, found in collector.statistics.items()}

    def report(self, rows: CalibrationSamples | None, ctx: Context) -> None:
        """Report results in the details and warnings of `ctx`.

        Raises:
            InputError: no layer could be made sparse.
        """
        if not self._zeros:
            why = (
                f"their input sizes are not multiples of {self._pattern.group}"
                if self._odd
                else "none is a linear layer"
            )
            raise InputError(
                f"sparsify: no layer of the blocks can be made sparse: {why}. Remove the stage.",
                code="no-layer-selected",
            )
        share = self._counts[0] / self._counts[1]
        ctx.details["sparsity"] = round(share, 4)
        ctx.details["zeros"] = self._counts[0]
        ctx.details["sparsity_by_layer"] = self._zeros
        ctx.warn(
            "zeros-not-faster",
            f"{share:.1%} of the weights of {len(self._zeros)} layers are zero. They are still stored"
            " and multiplied, so the model is neither smaller nor faster.",
        )
        if self._odd:
            ctx.warn(
                "pattern-does-not-fit",
                f"{len(self._odd)} layers are unchanged, because their input sizes are not multiples"
                f" of {self._pattern.group}: {', '.join(self._odd[:3])}.",
            )
        if self._unreached:
            ctx.warn(
                "uncalibrated-layers",
                f"No calibration sample reaches {', '.join(self._unreached)}; these layers are"
                " unchanged. Add calibration samples that use them.",
            )
        if (
            rows is not None
            and self._method.statistics == "moments"
            and (few := few_tokens_text(self._fed, rows))
        ):
            ctx.warn(
                "few-calibration-tokens",
                f"{few}; results may overfit. Increase calibration_samples, or add data:"
                f" {{calibration: FILE}}.",
            )


_MIN_KEPT_SHARE = 0.005  # of a matrix is always kept by soft-movement


class MaskedWeight(torch.autograd.Function):
    """W * M with a straight-through gradient from M to its scores."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        """Return W * M, float [N, K]."""
        ctx.save_for_backward(weight, mask)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return dL/dW = dL/dW' * M and dL/dS = dL/dW' * W."""
        weight, mask = ctx.saved_tensors
        return gradients[0] * mask, gradients[0] * weight, None


class GradualSparsifier:
    """The masks of one model while it trains.

    Args:
        model: its linear layers compute with masks until `finalize`.
        settings: of gradual sparsity.

    Raises:
        InputError: a layer has quantized weights, or no layer of the blocks fits the pattern.
    """

    def __init__(self, model: Any, settings: GradualSparsitySettings) -> None:
        self.settings = settings
        pattern = None if settings.pattern is None else parse_pattern(settings.pattern)
        self.layers = _layers_with_masks(
            model, settings, SparsityPattern(0.5, *pattern) if pattern else SparsityPattern(0.5)
        )
        self.held = {n: m.weight.detach() == 0 for n, m in self.layers.items() if is_masked(m)}
        scored = {n: nn.Parameter(torch.zeros_like(m.weight)) for n, m in self.layers.items()}
        self.home = nn.ParameterList(scored.values() if settings.trains_scores else ())
        self._numbers = {name: at for at, name in enumerate(self.layers)} if settings.trains_scores else {}
        self.masks: dict[str, Tensor] = {}
        self._made_of: dict[str, tuple[Any, ...]] = {}  # inputs of the cached masks
        self.part, self.end = 0.0, 1  # progress to the final sparsity; its last update
        for name, layer in self.layers.items():
            layer.forward = partial(self._masked_forward, name, layer)  # type: ignore[method-assign]

    @property
    def scores(self) -> dict[str, nn.Parameter]:
        """The trained scores of each layer, float [N, K]; empty if scores are the weights."""
        return {name: self.home[at] for name, at in self._numbers.items()}

    def extension(self) -> TrainingExtension:
        """Return the extension of the training."""
        rate = self.settings.scores_learning_rate
        return TrainingExtension(
            modules={"scores": self.home} if len(self.home) else {},
            groups=[ParameterGroup(list(self.home), learning_rate=rate, weight_decay=0.0)]
            if len(self.home)
            else (),
            before_step=self._before_step,
            supports_resume=True,  # masks depend only on the update's number, weights and scores
            may_be_best=self._may_be_best,
            as_stored=self.as_stored,
        )

    def objective(self, objective: Objective) -> Objective:
        """Return `objective` with the penalty on scores of soft-movement, in training mode only."""
        if self.settings.method != "soft-movement":
            return objective

        def with_penalty(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | LossTerms:
            found = objective(model, batch)
            if not model.training:
                return found
            total = sum(scores.numel() for scores in self.home)
            mean = torch.stack([scores.sigmoid().sum() for scores in self.home]).sum() / total
            return {**as_loss_terms(found), "penalty": LossTerm(self.settings.penalty * self.part * mean)}

        return with_penalty

    @torch.no_grad()
    def finalize(self, ctx: Context) -> None:
        """Set the masked weights to zero, restore the layers, and report to `ctx`."""
        self.part = 1.0  # also if the updates were done before, by an interrupted run
        zeros = weights = 0
        by_layer = {}
        for name, layer in self.layers.items():
            layer.weight.mul_(self._mask(name, layer))
            del layer.forward
            mark_masked(layer)
            gone = int((layer.weight == 0).sum())
            by_layer[name] = round(gone / layer.weight.numel(), 4)
            zeros, weights = zeros + gone, weights + layer.weight.numel()
        ctx.details["sparsity"] = round(zeros / weights, 4)
        ctx.details["zeros"] = zeros
        ctx.details["sparsity_by_layer"] = by_layer
        if not zeros:
            ctx.warn(
                "no-zeros",
                "sparsify: no weight was set to zero. Increase sparsify.penalty, sparsify.threshold,"
                " sparsify.scores_learning_rate or the number of updates.",
            )
            return
        ctx.warn(
            "zeros-not-faster",
            f"sparsify: {zeros / weights:.1%} of the weights of {len(by_layer)} layers are zero. They"
            " are still stored and multiplied, so the model is neither smaller nor faster.",
        )

    @contextlib.contextmanager
    def as_stored(self) -> Iterator[None]:
        """Set the masked weights to zero inside the context, as they would be stored."""
        kept = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
        with torch.no_grad():
            for name, layer in self.layers.items():
                layer.weight.mul_(self._mask(name, layer))
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                layer.weight.data.copy_(kept[name])

    def _before_step(self, step: int, total: int) -> None:
        """Begin an update: its first forward pass computes the masks."""
        first, self.end = self.settings.start * total, max(1, round(self.settings.end * total))
        way = min(1.0, max(0.0, (step - first) / max(1.0, self.end - first)))
        self.part = 1 - (1 - way) ** 3
        self.masks.clear()
        self._made_of.clear()

    def _may_be_best(self, step: int) -> bool:
        return step >= self.end and self.part == 1.0

    def _masked_forward(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return the output of a layer for `x` [..., K]; validations use the current masks."""
        mask = self.masks.get(name) if torch.is_grad_enabled() else self._cached_mask(name, layer)
        if mask is None:
            mask = self.masks[name] = self._mask(name, layer)
        if name in self._numbers:
            scores = self.home[self._numbers[name]]
            weight = MaskedWeight.apply(layer.weight, scores, mask)  # type: ignore[no-untyped-call]
        else:
            weight = layer.weight * mask
        return F.linear(x, weight, layer.bias)

    def _cached_mask(self, name: str, layer: nn.Linear) -> Tensor:
        """Return `_mask`, cached while weights and scores do not change, as in generation."""
        known = [layer.weight, *([self.home[self._numbers[name]]] if name in self._numbers else [])]
        made_of = (self.part, *((tensor._version, tensor.device) for tensor in known))
        if self._made_of.get(name) != made_of:
            self.masks[name], self._made_of[name] = self._mask(name, layer), made_of
        return self.masks[name]

    @torch.no_grad()
    def _mask(self, name: str, layer: nn.Linear) -> Tensor:
        """Return the current mask of a layer, float [N, K]: 1 for kept weights."""
        scores = self.home[self._numbers[name]] if name in self._numbers else layer.weight.abs()
        held = self.held.get(name)
        if held is not None:
            scores = scores.masked_fill(held.to(scores.device), -torch.inf)
        if self.settings.method == "soft-movement":
            stay = scores.sigmoid() > self.settings.threshold * self.part
            least = max(1, round(_MIN_KEPT_SHARE * scores.numel()))
            if int(stay.sum()) < least:
                best = scores.flatten().topk(least).indices
                stay = stay.flatten().index_fill(0, best, True).view_as(stay)
            return stay.to(layer.weight.dtype)
        return (~self._zero_mask(scores)).to(layer.weight.dtype)

    def _zero_mask(self, scores: Tensor) -> Tensor:
        """Return the weights that are zero at the current progress, bool [N, K]."""
        if self.settings.pattern is None:
            return SparsityPattern(self.part * self.settings.sparsity).zero_mask(scores, "matrix")
        kept, group = parse_pattern(self.settings.pattern)
        gone = SparsityPattern(1 - kept / group, kept, group).zero_mask(scores, "matrix")
        if self.part == 1.0:
            return gone
        among = scores.masked_fill(~gone, torch.inf)  # among the weights to remove, the smallest scores first
        few = SparsityPattern(self.part * (1 - kept / group)).zero_mask(among, "matrix")
        return few & gone


def _layers_with_masks(
    model: Any, settings: GradualSparsitySettings, pattern: SparsityPattern
) -> dict[str, nn.Linear]:
    """Return the layers that get masks by name; layers that share a weight count once."""
    found: dict[int, tuple[str, nn.Linear]] = {}
    for block in blocks_of(model):
        products = {name: model.get_submodule(name) for name in linear_layer_names(block, settings.targets)}
        layers = linear_layers(model, block, settings.targets)
        for name, layer in {**products, **layers}.items():
            if not isinstance(layer, LowRankLinear | SharedLinear) and type(layer) is not nn.Linear:
                raise InputError(
                    f"sparsify: '{name}' is a {type(layer).__name__}, whose weights are quantized;"
                    f" {TRAINING_BEFORE_QUANTIZE['sparsify'].replace('WORD', 'finetune')}",
                    code=AFTER_QUANTIZE,
                )
        for name, layer in layers.items():
            if pattern.fits(layer.in_features):
                found.setdefault(id(layer.weight), (name, layer))
    if not found:
        odd = "" if pattern.group is None else f", or their input sizes are not multiples of {pattern.group}"
        raise InputError(
            "sparsify: no layer of the blocks can be made sparse: the layers of"
            f" {model.config.model_type} are not supported{odd}. Remove sparsify.",
            code="no-layer-selected",
            setting="sparsify",
        )
    return dict(found.values())
