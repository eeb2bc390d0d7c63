"""The sparsity methods, which choose the weights to set to zero, and the loop over the layers of a block.

- magnitude: the smallest weights of a layer.
- random: a baseline for the other methods.
- SparseGPT: column by column, and the error is compensated in the columns to the right.
- Wanda: by the magnitude of a weight times the norm of its input.

Shapes: N = outputs, K = inputs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal, Protocol

import torch
from torch import Generator, Tensor, nn

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.sequential import ObserveInputs
from smelt.calibration.statistics import (
    InputStatistics,
    StatisticsCollector,
    few_tokens_text,
    input_width,
    inverse_cholesky,
)
from smelt.compress.sparsify.settings import SparsityPattern
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.models.edits import is_masked, mark_masked
from smelt.models.families.registry import Block
from smelt.models.layers import component_layers

# Statistics of a layer's inputs that a method needs: none, norms, second moments.
RequiredStatistics = Literal["nothing", "norms", "moments"]


class SparsityMethod(Protocol):
    """Chooses the weights to set to zero, and may update the kept ones."""

    name: ClassVar[str]
    source: ClassVar[str]
    statistics: ClassVar[RequiredStatistics]

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: SparsityPattern, draw: Generator
    ) -> Tensor:
        """Return the new weight, float32 [N, K], with zeros by `pattern`.

        Args:
            weight: float32 [N, K].
            found: statistics of the layer's inputs; None if the method needs none.
            pattern: number and positions of zeros.
            draw: generator of random numbers.
        """


class MagnitudeSparsity:
    """Compares |W| in a whole layer (Han et al. 2015; the baseline of Wanda's and SparseGPT's papers)."""

    name: ClassVar[str] = "magnitude"
    source: ClassVar[str] = "magnitude: Han et al. 2015, arXiv:1506.02626"
    statistics: ClassVar[RequiredStatistics] = "nothing"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: SparsityPattern, draw: Generator
    ) -> Tensor:
        """Return `weight` with zeros at its smallest magnitudes."""
        return weight.masked_fill(pattern.zero_mask(weight.abs(), "matrix"), 0.0)


class RandomSparsity:
    """Chooses the weights to remove at random, by the recipe's seed."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "random: a control"
    statistics: ClassVar[RequiredStatistics] = "nothing"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: SparsityPattern, draw: Generator
    ) -> Tensor:
        """Return `weight` with zeros at random places."""
        return weight.masked_fill(pattern.zero_mask(torch.rand(weight.shape, generator=draw), "matrix"), 0.0)


_BLOCK_COLUMNS = 128  # per mask


class SparseGpt:
    """Processes the columns from left to right, as the published code does (sparsegpt.py).

    Frantar & Alistarh 2023, SparseGPT, arXiv:2301.00774. With H = 2 X X^T / tokens (an input that is always 0
    has 1 on the diagonal and loses its weights; 1 % of the mean diagonal is added) and U the upper Cholesky
    factor of its inverse, the importance of a weight is w^2 / U_jj^2. In blocks of 128 columns the least
    important weights are chosen, over all rows (n of m: inside each group, when it is reached); then for each
    column the error of the removed weights, divided by U_jj, is compensated in the columns to its right along
    U's row.
    """

    name: ClassVar[str] = "sparsegpt"
    source: ClassVar[str] = "sparsegpt: Frantar & Alistarh 2023, arXiv:2301.00774"
    statistics: ClassVar[RequiredStatistics] = "moments"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: SparsityPattern, draw: Generator
    ) -> Tensor:
        """Return the weight with zeros and with compensated kept weights."""
        assert found is not None
        assert found.second_moment is not None
        dead = found.second_moment.diagonal() == 0
        factor = inverse_cholesky(found)[0].to(weight)
        new = weight.clone()
        new[:, dead] = 0.0
        block_size = max(1, _BLOCK_COLUMNS // (pattern.group or 1)) * (pattern.group or 1)  # whole groups
        for start in range(0, new.shape[1], block_size):
            end = min(start + block_size, new.shape[1])
            errors = _sparsify_columns(new[:, start:end], factor[start:end, start:end], pattern)
            new[:, end:] -= errors @ factor[start:end, end:]
        return new


def _sparsify_columns(columns: Tensor, factor: Tensor, pattern: SparsityPattern) -> Tensor:
    """Sparsify some columns, float [N, C], in place; return the errors [N, C] to compensate."""
    weighing = factor.diagonal().square()
    errors = torch.zeros_like(columns)
    gone = torch.zeros_like(columns, dtype=torch.bool)
    if pattern.group is None:
        gone = pattern.zero_mask(columns.square() / weighing, "matrix")
    for at in range(columns.shape[1]):
        if pattern.group is not None and at % pattern.group == 0:
            part = slice(at, at + pattern.group)
            gone[:, part] = pattern.zero_mask(columns[:, part].square() / weighing[part], "row")
        lost = columns[:, at].where(gone[:, at], torch.zeros(()))
        errors[:, at] = lost / factor[at, at]
        columns[:, at:] -= errors[:, at : at + 1] * factor[at, at:]
        columns[:, at].masked_fill_(gone[:, at], 0.0)  # exactly zero, without rounding errors
    return errors


class Wanda:
    """Compares |W_ij| |X_j| inside each output's row, X_j being input j over all calibration tokens.

    Sun et al. 2024, A Simple and Effective Pruning Approach for Large Language Models, arXiv:2306.11695,
    equation 1. Kept weights are not updated.
    """

    name: ClassVar[str] = "wanda"
    source: ClassVar[str] = "wanda: Sun et al. 2024, arXiv:2306.11695"
    statistics: ClassVar[RequiredStatistics] = "norms"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: SparsityPattern, draw: Generator
    ) -> Tensor:
        """Return `weight` with zeros at the smallest scores."""
        assert found is not None
        scores = weight.abs() * found.l2_norms.to(weight)
        return weight.masked_fill(pattern.zero_mask(scores, "row"), 0.0)


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
            sparse = self._method(weight, seen, self._pattern, self._draw)
            if is_masked(layer):  # it is already sparse
                sparse = sparse.masked_fill(weight == 0, 0.0)
            layer.weight.copy_(sparse)
            mark_masked(layer)
            zeros = int((layer.weight == 0).sum())
            self._counts = [self._counts[0] + zeros, self._counts[1] + weight.numel()]
            self._zeros[name] = round(zeros / weight.numel(), 4)

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
