"""Low rank: a linear layer becomes the product of two thin ones, by singular value decomposition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from smelt.compress.float_model import load_float, stored_parameters
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Task
from smelt.core.errors import InputError
from smelt.core.stage import Context, Need, Settings, StoredDtype

if TYPE_CHECKING:
    from torch import Tensor, nn

    from smelt.runtime.layers.low_rank import LowRankLinear

_DEFAULT_ENERGY = 0.95


class FactorizeSettings(Settings):
    """Settings of `factorize`. At most one of energy, rank, ratio; none means energy: 0.95."""

    method: Literal["svd"] = Field(default="svd", description="truncated singular value decomposition")
    energy: float | None = Field(
        default=None, gt=0, le=1, description="fraction of the sum of squared singular values that stays"
    )
    rank: int | None = Field(default=None, ge=1, description="the same rank for every layer")
    ratio: float | None = Field(
        default=None, gt=0, lt=1, description="fraction of a layer's weights that stays"
    )
    include: list[str] = Field(default=["*"], description="patterns of layer names, as in a shell")
    exclude: list[str] = Field(
        default=["lm_head", "classifier", "classifier.*", "pre_classifier", "*.pooler.*"],
        description="patterns of names to leave alone",
    )
    aim: Literal["latency", "size"] = Field(
        default="latency",
        description="what must gain, or a layer stays whole: latency (in int8 on a CPU), size (weights)",
    )
    dtype: StoredDtype = "keep"

    @model_validator(mode="after")
    def _one(self) -> FactorizeSettings:
        given = [n for n in ("energy", "rank", "ratio") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of energy, rank and ratio, not {' and '.join(given)}")
        return self


class Factorize:
    """Replace linear layers by a product of two thin ones, where that saves time, or weights.

    The best product of rank r (Eckart & Young 1936) comes from the singular value decomposition;
    what it loses is the square root of the sum of the dropped squared singular values. A layer of m by
    n costs r (m + n) weights afterwards, and one product more. With aim: latency it is left alone unless
    that is faster, by a rule that was measured in ONNX Runtime's int8: r (m + n) < 0.9 m n - 5,000 in an
    encoder, < 0.9 m n - 100,000 in a decoder, which gets one token a step. With aim: size it is left
    alone unless r < m n / (m + n). Which layers were, and why, is in the report. Trained layers often
    have flat spectra: expect little at energy 0.95, and recover with distill.

        - factorize: {method: svd, ratio: 0.6, include: ["*.fc1", "*.fc2"]}
        - distill: {epochs: 1}
        - factorize: {ratio: 0.5, aim: size}
    """

    name: ClassVar[str] = "factorize"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = "Eckart & Young 1936, Psychometrika 1(3); Denton et al. 2014, arXiv:1404.0736"
    version: ClassVar[int] = 3
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[FactorizeSettings]] = FactorizeSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    def __call__(self, src: Artifact, settings: FactorizeSettings, ctx: Context) -> None:
        """Factorize the layers of `src` that gain from it and write the model to `ctx.out`."""
        from smelt.compress.train.state import threads

        with threads(ctx.threads):
            self._factorize(src, settings, ctx)

    def _factorize(self, src: Artifact, settings: FactorizeSettings, ctx: Context) -> None:
        from smelt.compress.factorize.by_time import reading_texts
        from smelt.runtime.models.checkpoint import save_model
        from smelt.runtime.models.structure import replace_layer

        model, edits = load_float(src, self.name)
        layers = list(_candidates(model, settings))
        if not layers:
            raise InputError(
                f"factorize: include {settings.include}, exclude {settings.exclude} choose no linear layer."
            )
        ranks: dict[str, int] = {}
        alone: dict[str, str] = {}
        before, many = stored_parameters(model), reading_texts(model)
        for done, (names, layer) in enumerate(layers, start=1):
            name, limit = names[0], _limit(layer, settings, not many.isdisjoint(names))
            pair, rank, error = factorize_layer(layer, settings, limit)
            if pair is None:
                alone[name] = _reason(layer, rank, limit, settings)
            else:
                edit = {"op": "low_rank", "module": name, "rank": rank}
                replace_layer(model, edits, name, pair, edit)
                ranks[name] = rank
                ctx.facts.setdefault("relative_error", {})[name] = round(error, 4)
            ctx.progress(done, len(layers), name)
        ctx.facts["ranks"], ctx.facts["left_alone"] = ranks, alone
        ctx.facts["parameters_before"] = before
        ctx.facts["parameters_after"] = stored_parameters(model)
        if not ranks:
            ctx.warnings.append(_none_gains(len(layers), settings))
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))


def choose_rank(sigma: Tensor, rows: int, columns: int, settings: FactorizeSettings) -> int:
    """Return the rank that `settings` ask for, given the singular values (float64, falling)."""
    if settings.rank is not None:
        return min(settings.rank, len(sigma))
    if settings.ratio is not None:
        return max(1, int(settings.ratio * rows * columns / (rows + columns)))
    squares = sigma.square()
    # the share that a rank drops is summed from the small end, where a difference from 1 would be noise
    dropped = squares.flip(0).cumsum(0).flip(0)
    wanted = (1 - (settings.energy or _DEFAULT_ENERGY)) * squares.sum()
    return max(1, int((dropped > wanted).sum()))


def _limit(layer: nn.Linear, settings: FactorizeSettings, many: bool) -> float:
    """Return below which rank `layer` gains; `many`: it gets the tokens of a whole text at once."""
    from smelt.compress.factorize.by_time import largest_rank

    rows, columns = layer.weight.shape
    return largest_rank(rows, columns, many) if settings.aim == "latency" else _saving(rows, columns)


def _saving(rows: int, columns: int) -> float:
    return rows * columns / (rows + columns)


def _reason(layer: nn.Linear, rank: int, limit: float, settings: FactorizeSettings) -> str:
    rows, columns = layer.weight.shape
    if settings.aim == "size" or rank >= _saving(rows, columns):
        said = f"saves nothing; it would have to be below {_saving(rows, columns):.1f}"
    elif limit > 1:
        said = f"would be slower in int8; it would have to be below {limit:.1f}"
    else:
        said = "would be slower in int8, as every rank would"
    return f"rank {rank} of {rows} x {columns} {said}"


def _none_gains(count: int, settings: FactorizeSettings) -> str:
    what, instead = "weights", ""
    if settings.aim == "latency":
        what, instead = "time in int8", ", or give aim: size for what saves weights"
    return (
        f"factorize: left all {count} layers alone, because no rank saves {what} at these settings;"
        f" lower energy, rank or ratio{instead}"
    )


def factorize_layer(
    layer: nn.Linear, settings: FactorizeSettings, limit: float | None = None
) -> tuple[LowRankLinear | None, int, float]:
    """Return the best pair for `layer`, its rank and error; None for a pair of rank `limit` or more.

    W = U S V^T becomes up = U_r sqrt(S_r), down = sqrt(S_r) V_r^T; the bias stays with `up`. The
    error is |W - up down|_F / |W|_F = sqrt(sum of dropped sigma^2 / sum of all). Without a limit it is the
    rank from which a pair saves no weights.
    """
    import torch

    from smelt.runtime.layers.low_rank import LowRankLinear

    weight = layer.weight.detach().double()
    rows, columns = weight.shape
    u, sigma, vt = torch.linalg.svd(weight, full_matrices=False)
    rank = choose_rank(sigma, rows, columns, settings)
    error = float((sigma[rank:].square().sum() / sigma.square().sum().clamp(min=1e-300)).sqrt())
    if rank >= (_saving(rows, columns) if limit is None else limit):
        return None, rank, error
    pair = LowRankLinear(columns, rows, rank, bias=layer.bias is not None)
    root = sigma[:rank].sqrt()
    with torch.no_grad():
        pair.up.weight.copy_(u[:, :rank] * root)
        pair.down.weight.copy_(root.unsqueeze(1) * vt[:rank])
        if layer.bias is not None:
            pair.up.bias.copy_(layer.bias)
    return pair.eval(), rank, error


def _candidates(model: Any, settings: FactorizeSettings) -> Iterator[tuple[Sequence[str], nn.Linear]]:
    """Yield the linear layers that the patterns choose, with their names.

    Halves of a pair and tied weights are none. A layer that stands in several places is there once: chosen
    under one of its names, excluded under none.
    """
    from torch import nn

    from smelt.runtime.layers.low_rank import LowRankLinear
    from smelt.runtime.models.structure import names_of

    halves = {id(h) for m in model.modules() if isinstance(m, LowRankLinear) for h in (m.up, m.down)}
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module, names in names_of(model).items():
        if not isinstance(module, nn.Linear) or id(module) in halves or id(module.weight) in tied:
            continue
        wanted = any(fnmatchcase(n, pattern) for n in names for pattern in settings.include)
        if wanted and not any(fnmatchcase(n, pattern) for n in names for pattern in settings.exclude):
            yield names, module
