"""What the inputs of layers are on rows of data: second moments, sums, extremes; each layer's own.

A second moment X X^T is summed in float64 from float32 products of a batch (at most about a thousand tokens),
so that its error is that of a short sum, however many rows there are. Where all of them together would take
more memory than allowed, they lie in files that are mapped into memory and go at the end.

    with collected(model, rows, {"fc2": [model.model.encoder.layers[0].fc2]}, ctx) as found:
        found["fc2"].second  # float64 [K, K]

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

from smelt.compress.calibration.observe import Layers, observe
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.train.state import threads
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

# Second moments that take more than this lie on disk.
MEMORY_BYTES = 2 * 2**30


@dataclass
class InputStatistics:
    """What the inputs of one layer were.

    tokens: how many. second: X X^T, float64 [K, K], symmetric; None where it was not asked for. sums: of x;
    squares: of x^2; magnitudes: of |x|, each float64 [K]. lowest, highest: float32 [K], infinite where no
    token came. Padding is in none of them.
    """

    tokens: int
    sums: Tensor
    squares: Tensor
    magnitudes: Tensor
    lowest: Tensor
    highest: Tensor
    second: Tensor | None = None

    @property
    def width(self) -> int:
        """How many inputs the layer has."""
        return len(self.sums)

    @property
    def largest(self) -> Tensor:
        """The largest magnitude of each input, float32 [K]; 0 where no token came."""
        return torch.maximum(-self.lowest, self.highest).clamp(min=0)

    @property
    def norms(self) -> Tensor:
        """|X_j|, the L2 norm of each input over all tokens, float64 [K]."""
        return self.squares.sqrt()

    def centred(self) -> Tensor:
        """Return the second moment around the means, X X^T - n m m^T, float64 [K, K].

        Raises:
            ValueError: no second moment was taken.
        """
        if self.second is None:
            raise ValueError("no second moment was taken")
        return self.second - torch.outer(self.sums, self.sums) / max(1, self.tokens)

    def see(self, x: Tensor) -> None:
        """Take in float [tokens, K]."""
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
        if self.second is not None:
            self.second += x.t() @ x

    def to(self, device: str) -> InputStatistics:
        """Return the same on `device`."""
        return InputStatistics(
            self.tokens,
            *(t if t is None else t.to(device) for t in self._tensors()),  # type: ignore[arg-type]
        )

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return (self.sums, self.squares, self.magnitudes, self.lowest, self.highest, self.second)


def few_tokens(fed: Iterable[tuple[int, int]], rows: CalibrationRows) -> str:
    """Return that layers get fewer tokens than they have inputs, the worst of them; nothing where none does.

    In an encoder-decoder no layer gets the tokens of both sides. What gets one vector of each text (a
    classifier) is counted as if it got all tokens, or any usual number of rows would be too few.

    Args:
        fed: of each layer its tokens and its inputs.
        rows: on which they were seen.
    """
    seen = [(rows.tokens if tokens <= rows.rows else tokens, inputs) for tokens, inputs in fed if tokens]
    short = [(tokens, inputs) for tokens, inputs in seen if tokens < inputs]
    if not short:
        return ""
    tokens, inputs = min(short, key=lambda one: one[0] / one[1])
    return f"Only {tokens:,} calibration tokens of {rows.origin} for layers with {inputs:,} inputs"


def empty_statistics(
    width: int, *, second: bool, device: str = "cpu", file: Path | None = None
) -> InputStatistics:
    """Return the statistics of no token at all.

    Args:
        width: inputs of the layer.
        second: whether the second moment is to be taken.
        device: where they are summed.
        file: where the second moment is to lie, instead of in memory; only on the CPU.
    """
    sums, squares, magnitudes = (torch.zeros(width, dtype=torch.float64, device=device) for _ in range(3))
    lowest = torch.full((width,), float("inf"), device=device)
    moment = _moment(width, device, file) if second else None
    return InputStatistics(0, sums, squares, magnitudes, lowest, -lowest, moment)


def _moment(width: int, device: str, file: Path | None) -> Tensor:
    if file is None:
        return torch.zeros(width, width, dtype=torch.float64, device=device)
    flat = torch.from_file(str(file), shared=True, size=width * width, dtype=torch.float64)  # of zeros
    return flat.view(width, width)


def width_of(layer: nn.Module) -> int:
    """Return how many inputs a linear layer has, whatever it is made of (plain, a pair, codes)."""
    return int(layer.in_features)  # type: ignore[arg-type]


@dataclass
class Collector:
    """Statistics of several layers; its `see` is what `observe` calls.

    second: whether second moments are taken. folder: where they lie if they take more than `limit_bytes`.
    """

    widths: Mapping[str, int]
    second: bool = True
    device: str = "cpu"
    folder: Path | None = None
    limit_bytes: int = MEMORY_BYTES
    found: dict[str, InputStatistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        held = sum(8 * width**2 for width in self.widths.values())
        on_disk = self.second and self.folder is not None and self.device == "cpu" and held > self.limit_bytes
        for number, (key, width) in enumerate(self.widths.items()):
            file = self.folder / f"{number}.moment" if on_disk and self.folder else None
            self.found[key] = empty_statistics(width, second=self.second, device=self.device, file=file)

    def see(self, key: str, x: Tensor) -> None:
        """Take in what the layer `key` is fed, float [tokens, K]."""
        self.found[key].see(x)


@contextmanager
def collected(
    model: Any,
    rows: CalibrationRows,
    layers: Layers,
    ctx: Context,
    *,
    second: bool = True,
    limit_bytes: int = MEMORY_BYTES,
) -> Iterator[dict[str, InputStatistics]]:
    """Run `model` over `rows` once and give the statistics of what its `layers` are fed, by their keys.

    A layer that is called several times, because it stands in several places, sums over its uses.

    Args:
        model: float32, in eval mode, on the CPU; it computes on `ctx.device` meanwhile.
        rows: what it reads.
        layers: linear layers by a key of the caller's; several may have one, if they are equally wide.
        ctx: device, threads, progress; a temporary folder beside `ctx.out` where memory is short.
        second: whether second moments are taken, which cost a product of [K, tokens] with [tokens, K].
        limit_bytes: memory for the second moments; beyond it they lie on disk until the context ends.
    """
    device = torch_device(ctx.device)
    widths = {key: width_of(found[0]) for key, found in layers.items()}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moments-", dir=ctx.out.parent))
        stack.enter_context(threads(ctx.threads))
        collector = Collector(widths, second, device, Path(folder), limit_bytes)
        placed = CalibrationRows(rows.origin, placed_batches(rows, device), rows.rows, rows.tokens)
        try:
            observe(model.to(device), placed, layers, collector.see, ctx)
        finally:
            model.to("cpu")
        yield {key: found.to("cpu") for key, found in collector.found.items()}


def placed_batches(rows: CalibrationRows, device: str) -> list[dict[str, Tensor]]:
    """Return the batches of `rows` on `device`."""
    return [{name: value.to(device) for name, value in batch.items()} for batch in rows.batches]
