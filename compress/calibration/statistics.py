"""Statistics of the inputs of layers on samples: second moments, sums, extremes; for each layer.

A second moment X X^T is summed in float64 from float32 matrix multiplications of a batch (at most about a
thousand tokens), so that its error is that of a short sum for any number of samples. Beyond a memory limit
they are stored in memory-mapped files that are removed at the end.

    with collect_statistics(model, rows, {"fc2": [model.model.encoder.layers[0].fc2]}, ctx) as found:
        found["fc2"].second_moment  # float64 [K, K]

Shapes: K = inputs of a layer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.calibration.input_hooks import LayersByKey, observe_inputs
from smelt.compress.calibration.samples import CalibrationSamples
from smelt.compress.train.training_state import torch_threads
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

# Beyond this second moments are stored on disk.
STATISTICS_MEMORY_BYTES = 2 * 2**30


@dataclass
class InputStatistics:
    """Statistics of the inputs of one layer.

    tokens: number of tokens. second_moment: X X^T, float64 [K, K], symmetric; None if not collected. sums: of
    x; squares: of x^2; magnitudes: of |x|, each float64 [K]. lowest, highest: float32 [K], infinite without
    tokens. Padding is in none of them.
    """

    tokens: int
    sums: Tensor
    squares: Tensor
    magnitudes: Tensor
    lowest: Tensor
    highest: Tensor
    second_moment: Tensor | None = None

    @property
    def width(self) -> int:
        """The number of inputs of the layer."""
        return len(self.sums)

    @property
    def largest_magnitudes(self) -> Tensor:
        """The largest magnitude of each input, float32 [K]; 0 without tokens."""
        return torch.maximum(-self.lowest, self.highest).clamp(min=0)

    @property
    def l2_norms(self) -> Tensor:
        """|X_j|, the L2 norm of each input over all tokens, float64 [K]."""
        return self.squares.sqrt()

    def centred_second_moment(self) -> Tensor:
        """Return the second moment around the means, X X^T - n m m^T, float64 [K, K].

        Raises:
            ValueError: no second moment was collected.
        """
        if self.second_moment is None:
            raise ValueError("no second moment was collected")
        return self.second_moment - torch.outer(self.sums, self.sums) / max(1, self.tokens)

    def update(self, x: Tensor) -> None:
        """Add inputs, float [tokens, K]."""
        if not len(x):
            return
        x = x.float()
        self.tokens += len(x)
        self.sums += x.sum(dim=0, dtype=torch.float64)
        self.squares += x.double().square_().sum(dim=0)
        self.magnitudes += x.abs().sum(dim=0, dtype=torch.float64)
        low, high = x.aminmax(dim=0)
        torch.minimum(self.lowest, low, out=self.lowest)
        torch.maximum(self.highest, high, out=self.highest)
        if self.second_moment is not None:
            self.second_moment += x.t() @ x

    def to(self, device: str) -> InputStatistics:
        """Return the statistics on `device`."""
        return InputStatistics(
            self.tokens,
            *(t if t is None else t.to(device) for t in self._tensors()),  # type: ignore[arg-type]
        )

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return (self.sums, self.squares, self.magnitudes, self.lowest, self.highest, self.second_moment)


def few_tokens_text(token_counts: Iterable[tuple[int, int]], samples: CalibrationSamples) -> str:
    """Return the warning text if layers get fewer tokens than they have inputs (the worst layer), else "".

    In an encoder-decoder no layer gets the tokens of both sides. A layer with one vector per sample (a
    classifier) is counted as if it got all tokens; otherwise any usual number of samples would be too few.

    Args:
        token_counts: tokens and inputs of each layer.
        samples: the calibration samples.
    """
    seen = [
        (samples.tokens if tokens <= samples.num_samples else tokens, inputs)
        for tokens, inputs in token_counts
        if tokens
    ]
    short = [(tokens, inputs) for tokens, inputs in seen if tokens < inputs]
    if not short:
        return ""
    tokens, inputs = min(short, key=lambda one: one[0] / one[1])
    return f"Only {tokens:,} calibration tokens of {samples.origin} for layers with {inputs:,} inputs"


def empty_statistics(
    width: int, *, second: bool, device: str = "cpu", file: Path | None = None
) -> InputStatistics:
    """Return the statistics of no token.

    Args:
        width: inputs of the layer.
        second: whether to collect the second moment.
        device: where to sum.
        file: where to store the second moment, instead of memory; only on the CPU.
    """
    sums, squares, magnitudes = (torch.zeros(width, dtype=torch.float64, device=device) for _ in range(3))
    lowest = torch.full((width,), float("inf"), device=device)
    moment = _empty_second_moment(width, device, file) if second else None
    return InputStatistics(0, sums, squares, magnitudes, lowest, -lowest, moment)


def _empty_second_moment(width: int, device: str, file: Path | None) -> Tensor:
    if file is None:
        return torch.zeros(width, width, dtype=torch.float64, device=device)
    flat = torch.from_file(str(file), shared=True, size=width * width, dtype=torch.float64)  # of zeros
    return flat.view(width, width)


def input_width(layer: nn.Module) -> int:
    """Return the number of inputs of a linear layer of any type (plain, factorized, quantized)."""
    return int(layer.in_features)  # type: ignore[arg-type]


@dataclass
class StatisticsCollector:
    """Collects statistics of several layers; `update` is a callback of `observe_inputs`.

    second: whether second moments are collected. folder: for second moments beyond `limit_bytes`.
    """

    widths: Mapping[str, int]
    second: bool = True
    device: str = "cpu"
    folder: Path | None = None
    limit_bytes: int = STATISTICS_MEMORY_BYTES
    statistics: dict[str, InputStatistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        held = sum(8 * width**2 for width in self.widths.values())
        on_disk = self.second and self.folder is not None and self.device == "cpu" and held > self.limit_bytes
        for number, (key, width) in enumerate(self.widths.items()):
            file = self.folder / f"{number}.moment" if on_disk and self.folder else None
            self.statistics[key] = empty_statistics(width, second=self.second, device=self.device, file=file)

    def update(self, key: str, x: Tensor) -> None:
        """Add inputs of the layer `key`, float [tokens, K]."""
        self.statistics[key].update(x)


@contextmanager
def collect_statistics(
    model: Any,
    samples: CalibrationSamples,
    layers: LayersByKey,
    ctx: Context,
    *,
    second: bool = True,
    limit_bytes: int = STATISTICS_MEMORY_BYTES,
) -> Iterator[dict[str, InputStatistics]]:
    """Run `model` over `samples` once and yield the statistics of the inputs of its `layers`, by key.

    A layer that is called several times sums over its calls.

    Args:
        model: float32, in eval mode, on the CPU; it computes on `ctx.device` inside.
        samples: calibration samples.
        layers: linear layers by any key; layers of equal width may share one.
        ctx: device, threads, progress; a temporary folder next to `ctx.out` if memory is short.
        second: whether to collect second moments, at the cost of a matrix multiplication [K, tokens] by
            [tokens, K].
        limit_bytes: memory for the second moments; beyond it they are on disk until the context ends.
    """
    device = torch_device(ctx.device)
    widths = {key: input_width(found[0]) for key, found in layers.items()}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moments-", dir=ctx.out.parent))
        stack.enter_context(torch_threads(ctx.threads))
        collector = StatisticsCollector(widths, second, device, Path(folder), limit_bytes)
        placed = CalibrationSamples(
            samples.origin, batches_on_device(samples, device), samples.num_samples, samples.tokens
        )
        try:
            observe_inputs(model.to(device), placed, layers, collector.update, ctx)
        finally:
            model.to("cpu")
        yield {key: found.to("cpu") for key, found in collector.statistics.items()}


def batches_on_device(samples: CalibrationSamples, device: str) -> list[dict[str, Tensor]]:
    """Return the batches of `samples` on `device`."""
    return [{name: value.to(device) for name, value in batch.items()} for batch in samples.batches]
