"""Statistics of a model on samples: second moments, sums and extremes of layer inputs; squared gradients.

A second moment X X^T is summed in float64 from float32 matrix multiplications of a batch (at most about a
thousand tokens), so that its error is that of a short sum for any number of samples. Beyond a memory limit
the second moments are stored in memory-mapped files that are removed at the end.

    with collect_statistics(model, rows, {"fc2": [model.model.encoder.layers[0].fc2]}, ctx) as found:
        found["fc2"].second_moment  # float64 [K, K]

`cached_statistics` stores them in the store: steps that calibrate one model on the same samples do it once,
also for another keep_ratio, rank or energy. The sums are stored in float64, so a step computes exactly the
same result from them as from a pass of its own.

`inverse_cholesky` returns the factor that SparseGPT (Frantar & Alistarh 2023, arXiv:2301.00774) and GPTQ
(Frantar et al. 2023, arXiv:2210.17323) use, as in their published code: H = 2 X X^T / tokens, 1 on the
diagonal of inputs that are always 0, and a part of the mean diagonal added to all.

`squared_gradients` returns the diagonal of the empirical Fisher information matrix: the mean over samples of
the squared gradient of each sample's loss (Hsu et al. 2022, FWSVD, arXiv:2207.00112, equation 4, where it
weights the rows of a matrix). The gradient of a batch is a mean over samples, and its square is smaller, so
samples are processed one by one.

Shapes: K = inputs of a layer.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from smelt.calibration.samples import CalibrationSamples, LayersByKey, ObserveInputs, observe_inputs
from smelt.core.errors import RunError
from smelt.core.files import json_hash
from smelt.models.model_size import STATISTICS_MEMORY_BYTES, TOKENS_PER_INPUT
from smelt.runtimes.device import torch_device, torch_threads
from smelt.stage import Context
from smelt.tasks.samples import TensorBatch


@dataclass
class InputStatistics:
    """Statistics of the inputs of one layer.

    tokens: number of tokens. second_moment: X X^T, float64 [K, K], symmetric; None if not collected. sums: of
    x; squares: of x^2; magnitudes: of |x|, each float64 [K]. Padding is in none of them. held_back: those of
    the samples that are held back from calibration. cross_moment: of the inputs X and those of a reference
    model, R, on the same tokens: (R - X) X^T, float64 [K, K]; None if not collected.
    """

    tokens: int
    sums: Tensor
    squares: Tensor
    magnitudes: Tensor
    second_moment: Tensor | None = None
    held_back: InputStatistics | None = None
    cross_moment: Tensor | None = None

    @property
    def judged(self) -> InputStatistics:
        """The statistics that errors are measured by: of the samples held back, if they reach the layer."""
        return self.held_back if self.held_back is not None and self.held_back.tokens else self

    @property
    def width(self) -> int:
        """The number of inputs of the layer."""
        return len(self.sums)

    @property
    def l2_norms(self) -> Tensor:
        """|X_j|, the L2 norm of each input over all tokens, float64 [K]."""
        return self.squares.sqrt()

    @property
    def mean(self) -> Tensor:
        """The mean of each input, float64 [K]."""
        return self.sums / max(1, self.tokens)

    def centered_second_moment(self, mean: Tensor | None = None) -> Tensor:
        """Return the second moment around `mean`, by default that of the inputs, float64 [K, K].

        Raises:
            ValueError: no second moment was collected.
        """
        if self.second_moment is None:
            raise ValueError("no second moment was collected")
        center = self.mean if mean is None else mean
        cross = torch.outer(self.sums, center)
        return self.second_moment - cross - cross.T + self.tokens * torch.outer(center, center)

    def update(self, x: Tensor) -> None:
        """Add inputs, float [tokens, K]."""
        if not len(x):
            return
        x = x.float()
        self.tokens += len(x)
        self.sums += x.sum(dim=0, dtype=torch.float64)
        self.squares += x.double().square_().sum(dim=0)
        self.magnitudes += x.abs().sum(dim=0, dtype=torch.float64)
        if self.second_moment is not None:
            self.second_moment += x.t() @ x

    def to(self, device: str) -> InputStatistics:
        """Return the statistics on `device`."""
        return InputStatistics(
            self.tokens,
            self.sums.to(device),
            self.squares.to(device),
            self.magnitudes.to(device),
            None if self.second_moment is None else self.second_moment.to(device),
            None if self.held_back is None else self.held_back.to(device),
            None if self.cross_moment is None else self.cross_moment.to(device),
        )


# Second moments of fewer tokens for each input are reported; stages calibrate on twice as many by default.
MIN_TOKENS_PER_INPUT = TOKENS_PER_INPUT / 2


def warn_of_few_tokens(
    token_counts: Iterable[tuple[int, int]], samples: CalibrationSamples, ctx: Context
) -> None:
    """Warn if layers have few calibration tokens for each of their inputs, with the numbers of the worst one.

    In an encoder-decoder no layer gets the tokens of both sides. A layer with one vector per sample (a
    classifier) is counted as if it got all tokens; otherwise any usual number of samples would be too few.

    Args:
        token_counts: tokens and inputs of each layer whose second moment is used.
        samples: the calibration samples.
        ctx: receives the warning.
    """
    tokens_and_inputs = [
        (samples.tokens if tokens <= samples.num_samples else tokens, inputs)
        for tokens, inputs in token_counts
        if tokens
    ]
    tokens, inputs = min(tokens_and_inputs, key=lambda counts: counts[0] / counts[1], default=(1, 0))
    if tokens < MIN_TOKENS_PER_INPUT * inputs:
        needed = math.ceil(samples.num_samples * TOKENS_PER_INPUT * inputs / tokens)
        ctx.warn(
            "few-calibration-tokens",
            f"Only {tokens:,} calibration tokens of {samples.origin} for layers with {inputs:,} inputs,"
            f" {tokens / inputs:.1f} for each input; results may overfit. About {needed:,} samples are"
            f" needed, {samples.num_samples:,} are used: increase calibration_samples, or add samples to the"
            " calibration data (data.calibration, else data.train).",
        )


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
    moment = _empty_second_moment(width, device, file) if second else None
    return InputStatistics(0, sums, squares, magnitudes, moment)


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
        total_bytes = sum(8 * width**2 for width in self.widths.values())
        on_disk = (
            self.second
            and self.folder is not None
            and self.device == "cpu"
            and total_bytes > self.limit_bytes
        )
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
    observe: ObserveInputs | None = None,
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
        observe: runs a part of the model instead, which is on `ctx.device` already.
    """
    device = torch_device(ctx.device)
    widths = {key: input_width(modules[0]) for key, modules in layers.items()}
    with ExitStack() as stack:
        stack.enter_context(torch_threads(ctx.threads))

        def collect(part: CalibrationSamples) -> dict[str, InputStatistics]:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moments-", dir=ctx.out.parent))
            collector = StatisticsCollector(widths, second, device, Path(folder), limit_bytes)
            if layers and observe is not None:
                observe(layers, collector.update, held_back=part is not samples)
            elif layers:
                try:
                    device_samples = replace(part, batches=batches_on_device(part, device))
                    observe_inputs(model.to(device), device_samples, layers, collector.update, ctx)
                finally:
                    model.to("cpu")
            collected = collector.statistics
            return {key: collected.pop(key).to("cpu") for key in list(collected)}

        statistics = collect(samples)
        held_back = {} if samples.held_back is None else collect(samples.held_back)
        for key, entry in statistics.items():
            entry.held_back = held_back.pop(key, None)
        yield statistics  # the caller may pop them


def batches_on_device(samples: CalibrationSamples, device: str) -> list[dict[str, Tensor]]:
    """Return the batches of `samples` on `device`."""
    return [{name: value.to(device) for name, value in batch.items()} for batch in samples.batches]


STATISTICS_VERSION = 1  # raise it whenever the same layers and samples give other sums
_STATISTICS_FILE = "statistics.safetensors"
_STORED_SUMS = ("sums", "squares", "magnitudes")  # of every layer, without `second`


class _NoRoomError(Exception):
    pass


@contextmanager
def cached_statistics(
    model: Any,
    samples: CalibrationSamples,
    layers: LayersByKey,
    ctx: Context,
    *,
    artifact_key: str,
    second: bool = True,
    limit_bytes: int = STATISTICS_MEMORY_BYTES,
) -> Iterator[dict[str, InputStatistics]]:
    """Yield the statistics of the inputs of `layers`, like `collect_statistics`, cached in the store.

    Args:
        model: as stored under `artifact_key`: float32, in eval mode, on the CPU.
        samples: calibration samples.
        layers: by a key that identifies the layers in the model.
        ctx: the store, device, threads, progress.
        artifact_key: the key of the artifact that the model was loaded from.
        second: whether to collect second moments.
        limit_bytes: larger statistics are not cached, nor those that do not fit on the disk.
    """
    widths = {key: input_width(collected[0]) for key, collected in layers.items()}
    needed_bytes = sum(8 * (width**2 if second else 0) + 24 * width for width in widths.values())
    needed_bytes *= 1 if samples.held_back is None else 2
    description = {
        "what": f"statistics of {len(layers)} layers on {samples.num_samples:,} samples",
        "version": STATISTICS_VERSION,
        "artifacts": [artifact_key],
        "rows": batches_fingerprint(samples),
        "held_back": None if samples.held_back is None else batches_fingerprint(samples.held_back),
        "layers": json_hash(widths),
        "second": second,
        "device": torch_device(ctx.device),
    }

    def make(folder: Path) -> None:
        if 2 * needed_bytes > shutil.disk_usage(folder).free:
            raise _NoRoomError
        with collect_statistics(
            model, samples, layers, ctx, second=second, limit_bytes=limit_bytes
        ) as collected:
            _write_statistics(collected, folder / _STATISTICS_FILE)

    with ExitStack() as stack:
        try:
            if needed_bytes > limit_bytes:
                raise _NoRoomError
            folder, _ = stack.enter_context(ctx.cached_files(description, make))
        except _NoRoomError:
            yield stack.enter_context(
                collect_statistics(model, samples, layers, ctx, second=second, limit_bytes=limit_bytes)
            )
            return
        yield _read_statistics(folder / _STATISTICS_FILE, widths)


def batches_fingerprint(samples: CalibrationSamples) -> str:
    """Return a hash of all model inputs in `samples`, batch by batch."""
    digest = hashlib.sha256()
    for batch in samples.batches:
        for name, tensor in sorted(batch.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _write_statistics(statistics: dict[str, InputStatistics], path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for key, layer_statistics in statistics.items():
        for prefix, entry in ((key, layer_statistics), (f"{key}|held_back", layer_statistics.held_back)):
            if entry is None:
                continue
            parts = {name: getattr(entry, name) for name in _STORED_SUMS}
            parts["tokens"] = torch.tensor(entry.tokens)
            if entry.second_moment is not None:
                parts["second"] = entry.second_moment
            tensors |= {f"{prefix}|{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(tensors, path)


def _read_statistics(path: Path, widths: dict[str, int]) -> dict[str, InputStatistics]:
    tensors = load_file(path)

    def read(prefix: str) -> InputStatistics | None:
        if f"{prefix}|tokens" not in tensors:
            return None
        sums, squares, magnitudes = (tensors[f"{prefix}|{name}"] for name in _STORED_SUMS)
        tokens, second = int(tensors[f"{prefix}|tokens"]), tensors.get(f"{prefix}|second")
        return InputStatistics(tokens, sums, squares, magnitudes, second, read(f"{prefix}|held_back"))

    return {key: entry for key in widths if (entry := read(key)) is not None}


HESSIAN_DAMPING = 0.01  # relative to the mean of the diagonal
_MAX_DAMPING = 10.0  # more damping would drown H


class NotInvertibleError(ValueError):
    """The second moment of a layer's inputs has no inverse."""


def inverse_cholesky(statistics: InputStatistics, order: Tensor | None = None) -> tuple[Tensor, float]:
    """Return U, upper triangular float64 [K, K], with U^T U the inverse of the damped H [K, K].

    The damping is 1 % of the mean diagonal, or the smallest power of ten times that which makes H invertible;
    it is returned as well. At most two matrices of the size of the second moment are in memory in addition.

    Args:
        statistics: of the layer's inputs, with the second moment.
        order: of the inputs in H, int64 [K]; None: their own.

    Raises:
        NotInvertibleError: H is not invertible with any damping (it is not finite, or not semidefinite).
    """
    damping = HESSIAN_DAMPING
    while damping <= _MAX_DAMPING:
        factor = _inverse_cholesky(statistics, damping, order)
        if factor is not None:
            return factor, damping
        damping *= 10
    raise NotInvertibleError("the second moment of its inputs cannot be inverted")


def _inverse_cholesky(statistics: InputStatistics, damp: float, order: Tensor | None) -> Tensor | None:
    """Return U for one damping, None if H is not invertible with it; frees memory as early as possible."""
    assert statistics.second_moment is not None
    moment = statistics.second_moment
    matrix = moment.clone() if order is None else moment[order[:, None], order]
    matrix *= 2 / max(1, statistics.tokens)
    diagonal = matrix.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal.add_(damp * float(diagonal.mean()))
    del diagonal  # a view, which would keep the matrix in memory
    matrix, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        return None
    matrix = torch.cholesky_inverse(matrix)
    factor, info = torch.linalg.cholesky_ex(matrix, upper=True)
    # the sum detects values that are not finite without the extra matrix of isfinite
    return None if int(info) or not bool(factor.sum().isfinite()) else factor


def squared_gradients(
    model: Any,
    samples: CalibrationSamples,
    parameters: Mapping[str, Tensor],
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
    ctx: Context,
) -> dict[str, Tensor]:
    """Return the mean over samples of the squared gradient of the loss, float32 in the parameter's shape.

    For a sentence embedder, whose loss compares pairs, it is the mean over batches.

    Args:
        model: float32, in eval mode, on the CPU; it computes on `ctx.device` inside, and has no gradients
            afterwards.
        samples: with labels (`load_calibration_samples(..., labels=True)`).
        parameters: of the model, by any key.
        loss: the training loss of a model and a batch, a float32 scalar (`label_objective()`).
        ctx: device, threads, progress.

    Raises:
        RunError: a gradient is not finite.
    """
    device = torch_device(ctx.device)
    single = [sample for batch in batches_on_device(samples, device) for sample in _split_batch(batch)]
    target_ids = {id(parameter) for parameter in parameters.values()}
    with torch_threads(ctx.threads):
        frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in target_ids]
        for parameter in frozen:  # whose gradients are not needed
            parameter.requires_grad_(False)
        try:
            sums = _sum_squared_gradients(model.to(device), single, parameters, loss, ctx)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            model.zero_grad(set_to_none=True)
            model.to("cpu")
    non_finite = next((key for key, value in sums.items() if not bool(value.isfinite().all())), None)
    if non_finite is not None:
        raise RunError(
            f"{non_finite}: the gradient on samples of {samples.origin} is not finite. The training before"
            " this step has probably diverged; lower its learning_rate.",
            code="non-finite-gradients",
        )
    return {key: value.cpu() for key, value in sums.items()}


def _split_batch(batch: TensorBatch) -> list[TensorBatch]:
    """Return the samples of `batch` as single batches; a batch of pairs is not split."""
    count = len(batch["labels"])
    if len(batch.get("input_ids", batch["labels"])) != count:
        return [batch]
    return [{name: value[index : index + 1] for name, value in batch.items()} for index in range(count)]


def _sum_squared_gradients(
    model: Any,
    batches: list[TensorBatch],
    parameters: Mapping[str, Tensor],
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
    ctx: Context,
) -> dict[str, Tensor]:
    sums = {key: torch.zeros_like(p, dtype=torch.float32) for key, p in parameters.items()}
    for num_done, batch in enumerate(batches, start=1):
        model.zero_grad(set_to_none=True)
        loss(model, batch).backward()
        for key, parameter in parameters.items():
            if parameter.grad is not None:
                sums[key].addcmul_(parameter.grad, parameter.grad, value=1 / len(batches))
        ctx.progress(num_done, len(batches), "gradients")
    return sums
