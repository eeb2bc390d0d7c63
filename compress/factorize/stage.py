"""Low rank: a linear layer becomes the product of two thin ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.float_model import load_float, stored_parameters
from smelt.compress.train.run import scores_lacking
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Split, Task
from smelt.core.errors import InputError
from smelt.core.stage import Context, Need

if TYPE_CHECKING:
    from torch import nn

    from smelt.compress.factorize.metrics import Metrics


class Factorize:
    """Replace linear layers by a product of two thin ones, where that saves weights.

    The best product of rank r (Eckart & Young 1936) comes from the singular value decomposition; of what is
    best in, the methods differ: the layer's outputs on real rows (whitened-svd), its weights (svd), weights
    times the inputs' magnitudes (asvd), weights times what the loss says of their rows (fwsvd). What is lost
    is the square root of the sum of the dropped squared singular values. A layer of m by n costs r (m + n)
    weights afterwards, so it is left alone unless r < m n / (m + n); which layers were, and why, is in the
    report. One budget over all layers gives each its own rank. Recover with distill.

        - factorize: {budget: {parameters: 0.7}}
        - factorize: {method: svd, ratio: 0.6, include: ["*.fc1", "*.fc2"]}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "factorize"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = (
        "svd: Eckart & Young 1936, Psychometrika 1(3), Denton et al. 2014, arXiv:1404.0736; whitened-svd:"
        " SVD-LLM, Wang et al. 2024, arXiv:2403.07378; asvd: Yuan et al. 2023, arXiv:2312.05821; fwsvd:"
        " Hsu et al. 2022, arXiv:2207.00112"
    )
    version: ClassVar[int] = 3
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[FactorizeSettings]] = FactorizeSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def needs_with(cls, settings: FactorizeSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs: rows where it looks at any, those for calibration if there are any."""
        if not settings.reads_rows:
            return frozenset()
        return frozenset({"calibration"} if "calibration" in given else {"train"})

    @classmethod
    def check_rows(
        cls, settings: FactorizeSettings, task: Task, data: Mapping[str, Split]
    ) -> list[tuple[str, str]]:
        """Return what does not fit the rows: fwsvd of a sentence embedder looks at a loss made of scores."""
        if settings.method != "fwsvd":
            return []
        found = scores_lacking(task, data, ("calibration",) if "calibration" in data else ("train",))
        return [("method", f"{text} Or take whitened-svd.") for _, text in found]

    def __call__(self, src: Artifact, settings: FactorizeSettings, ctx: Context) -> None:
        """Factorize the layers of `src` that gain from it and write the model to `ctx.out`."""
        from smelt.compress.train.state import threads

        with threads(ctx.threads):
            self._factorize(src, settings, ctx)

    def _factorize(self, src: Artifact, settings: FactorizeSettings, ctx: Context) -> None:
        from smelt.compress.factorize.metrics import found_metrics
        from smelt.compress.factorize.ranks import find_ranks
        from smelt.runtime.models.checkpoint import save_model

        model, edits = load_float(src, self.name)
        layers = dict(candidates(model, settings))
        if not layers:
            raise InputError(
                f"factorize: include {settings.include}, exclude {settings.exclude} choose no linear layer."
            )
        before = stored_parameters(model)
        with found_metrics(model, layers, src, settings, ctx) as metrics:
            for name in metrics.unseen:
                layers.pop(name)
            ranks = find_ranks(model, layers, metrics, settings, ctx)
            _replace(model, edits, layers, ranks, metrics, ctx)
        ctx.facts["parameters_before"] = before
        ctx.facts["parameters_after"] = stored_parameters(model)
        if not ctx.facts["ranks"]:
            ctx.warnings.append(
                f"factorize: left all {len(layers)} layers alone, because no rank saves weights at these"
                " settings; lower energy, rank or ratio"
            )
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))


def _replace(
    model: Any,
    edits: list[Any],
    layers: Mapping[str, nn.Linear],
    ranks: Mapping[str, int],
    metrics: Metrics,
    ctx: Context,
) -> None:
    """Put pairs in the place of the layers that gain; `ctx.facts` says what became of each."""
    from smelt.compress.factorize.ranks import saves
    from smelt.compress.factorize.svd import thin_pair
    from smelt.runtime.models.structure import replace_layer

    done: dict[str, int] = {}
    alone: dict[str, str] = {}
    errors: dict[str, float] = {}
    for at, (name, layer) in enumerate(layers.items(), start=1):
        rows, columns = layer.weight.shape
        if saves(ranks[name], rows, columns):
            pair, error = thin_pair(layer, ranks[name], metrics.of(name, layer))
            replace_layer(model, edits, name, pair, {"op": "low_rank", "module": name, "rank": ranks[name]})
            done[name], errors[name] = ranks[name], round(error, 4)
        else:
            alone[name] = (
                f"rank {ranks[name]} of {rows} x {columns} saves nothing; it would have to be below"
                f" {rows * columns / (rows + columns):.1f}"
            )
        ctx.progress(at, len(layers), name)
    alone |= dict.fromkeys(metrics.unseen, "no row reaches it")
    ctx.facts.update(ranks=done, left_alone=alone, relative_error=errors)


def candidates(model: Any, settings: FactorizeSettings) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that the patterns choose; halves of a pair and tied weights are none.

    A layer that stands in several places is there once: chosen under one of its names, excluded under none.
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
            yield names[0], module
