"""Low rank: a linear layer becomes the product of two thin ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.float_model import load_float, stored_parameters
from smelt.compress.train.run import scores_lacking
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Split, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, mistake
from smelt.core.stage import Context, Need
from smelt.core.text import article

if TYPE_CHECKING:
    from torch import nn

    from smelt.compress.factorize.metrics import Metrics
    from smelt.runtime.models.streamed import StreamedModel


class Factorize:
    """Replace linear layers by a product of two thin ones, where that saves time, or weights.

    The best product of rank r (Eckart & Young 1936) comes from the singular value decomposition; of what is
    best in, the methods differ: the layer's outputs on real rows (whitened-svd), its weights (svd), weights
    times the inputs' magnitudes (asvd), weights times what the loss says of their inputs (fwsvd). What is
    lost is the square root of the sum of the dropped squared singular values. A layer of m by n costs
    r (m + n) weights afterwards, and one more matrix multiplication. With optimize_for: latency it is left
    alone unless that is faster, by a rule that was measured in ONNX Runtime's int8: r (m + n) < 0.9 m n -
    5,000 in an encoder, < 0.9 m n - 100,000 in a decoder, which gets one token a step. With optimize_for:
    size it is left alone unless r < m n / (m + n). Which layers were, and why, is in the report. One budget
    over all layers gives each its own rank. With targets: embeddings the token embedding becomes a thin
    table and a linear layer, and the output layer that has the same matrix reads the same table.

    Convolutions are replaced by thinner ones: those of Tucker-2 (a change of channels, a smaller kernel, a
    change back), or of CP (a convolution for each axis), with ranks by keep_ratio, energy, or VBMF, which
    estimates the noise. One is left alone unless its multiply-adds (or weights) become fewer. Recover with
    distill.

        - factorize: {targets: embeddings, rank: 128}
        - factorize: {parameter_budget: 0.7, optimize_for: size}
        - factorize: {method: svd, keep_ratio: 0.6, include: ["*.fc1", "*.fc2"]}
        - factorize: {method: tucker, keep_ratio: 0.5}    # convolutions
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "factorize"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = (
        "svd: Eckart & Young 1936, Psychometrika 1(3), Denton et al. 2014, arXiv:1404.0736; whitened-svd:"
        " SVD-LLM, Wang et al. 2024, arXiv:2403.07378; asvd: Yuan et al. 2023, arXiv:2312.05821; fwsvd:"
        " Hsu et al. 2022, arXiv:2207.00112; tucker: Kim et al. 2016, arXiv:1511.06530; cp: Lebedev et al."
        " 2015, arXiv:1412.6553; vbmf: Nakajima et al. 2013, JMLR 14; embeddings: ALBERT, Lan et al. 2020,"
        " arXiv:1909.11942"
    )
    version: ClassVar[int] = 8
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[FactorizeSettings]] = FactorizeSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def needs_with(cls, settings: FactorizeSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs: rows where it looks at any, those for calibration if there are any."""
        there = {"calibration", "train"} & set(given)
        counts = settings.targets == "embeddings" and settings.frequency_weighted is None and there
        if not settings.reads_rows and not counts:
            return frozenset()
        return frozenset({"calibration"} if "calibration" in given else {"train"})

    @classmethod
    def check_rows(cls, settings: FactorizeSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return what does not fit the rows: fwsvd of a sentence embedder looks at a loss made of scores."""
        if settings.method != "fwsvd":
            return []
        found = scores_lacking(task, data, ("calibration",) if "calibration" in data else ("train",))
        return [mistake(one.code, f"{one.message} Or take whitened-svd.", setting="method") for one in found]

    @classmethod
    def check_model(
        cls, settings: FactorizeSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        from smelt.families.registry import blockless, find_family

        family, lack = find_family(config), blockless(config)
        if settings.targets == "embeddings" and family is not None and family.reads == "images":
            text = f"{article(family.name)} model reads images and has no words; leave it out."
            return [mistake("does-not-fit-model", text, setting="targets")], config
        if family is not None and settings.of_convolutions and family.reads != "images":
            kind = article(family.name)
            text = f"{kind} model has no convolutions; take whitened-svd."
            return [mistake("does-not-fit-model", text, setting="method")], config
        if lack is not None and not settings.of_convolutions:
            text = f"{lack}; take tucker or cp, for its convolutions."
            return [mistake("does-not-fit-model", text, setting="method")], config
        return [], config

    def __call__(self, src: Artifact, settings: FactorizeSettings, ctx: Context) -> None:
        """Factorize the layers of `src` that gain from it and write the model to `ctx.out`."""
        from smelt.compress.train.state import threads

        with threads(ctx.threads):
            (self._convolutions if settings.of_convolutions else self._factorize)(src, settings, ctx)

    def _convolutions(self, src: Artifact, settings: FactorizeSettings, ctx: Context) -> None:
        from smelt.compress.factorize.convolutions import factorize_convolutions
        from smelt.runtime.images.processor import read_processor
        from smelt.runtime.models.checkpoint import save_model

        model, edits = load_float(src, self.name)
        for one in self.check_model(settings, model.config.to_dict())[0]:
            raise InputError(f"factorize: {one.message}", code=one.code, setting=one.setting)
        factorize_convolutions(model, edits, read_processor(src.path), settings, ctx)
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))

    def _factorize(self, src: Artifact, settings: FactorizeSettings, ctx: Context) -> None:
        from smelt.runtime.models.checkpoint import save_model

        streamed = _streamed(src, settings, ctx)
        if streamed is not None:
            self._blocks(streamed, src, settings, ctx)
            return
        model, edits = load_float(src, self.name)
        for one in self.check_model(settings, model.config.to_dict())[0]:
            raise InputError(f"factorize: {one.message}", code=one.code, setting=one.setting)
        ctx.details["parameters_before"] = stored_parameters(model)
        if settings.targets == "embeddings":
            from smelt.compress.factorize.embeddings import factorize_tables

            factorize_tables(model, edits, src, settings, ctx)
        else:
            self._layers(model, edits, src, settings, ctx)
        ctx.details["parameters_after"] = stored_parameters(model)
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))

    def _layers(
        self, model: Any, edits: list[Any], src: Artifact, settings: FactorizeSettings, ctx: Context
    ) -> None:
        from smelt.compress.factorize.metrics import found_metrics
        from smelt.compress.factorize.ranks import find_ranks, limits_of

        chosen = _chosen(model, settings, ctx)
        if not chosen:
            return
        limits = limits_of(model, chosen, settings)
        layers = {names[0]: layer for layer, names in chosen.items()}
        with found_metrics(model, layers, src, settings, ctx) as metrics:
            for name in metrics.unseen:
                layers.pop(name)
            ranks = find_ranks(model, layers, limits, metrics, settings, ctx)
            pairs = {name: rank for name, rank in ranks.items() if rank < limits[name]}
            _replace(model, edits, layers, pairs, metrics, ctx)
        _tell(layers, ranks, limits, metrics.unseen, settings, ctx)

    def _blocks(
        self, streamed: StreamedModel, src: Artifact, settings: FactorizeSettings, ctx: Context
    ) -> None:
        """Factorize a large model block by block, from file to file."""
        from smelt.compress.factorize.block_by_block import factorize_blocks
        from smelt.compress.factorize.ranks import limits_of

        model = streamed.model
        for one in self.check_model(settings, model.config.to_dict())[0]:
            raise InputError(f"factorize: {one.message}", code=one.code, setting=one.setting)
        ctx.details["parameters_before"] = stored_parameters(model)
        chosen = _chosen(model, settings, ctx)
        limits = limits_of(model, chosen, settings)
        layers = {names[0]: layer for layer, names in chosen.items()}
        ranks, unseen = factorize_blocks(streamed, list(layers), limits, src, settings, ctx)
        if chosen:
            _tell({n: m for n, m in layers.items() if n in ranks}, ranks, limits, unseen, settings, ctx)
        ctx.details["parameters_after"] = stored_parameters(model)
        ctx.warnings.extend(streamed.finish(streamed.edits))


def _streamed(src: Artifact, settings: FactorizeSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model to be taken block by block; a budget and gradients need it whole."""
    from smelt.compress.factorize.block_by_block import all_inside, can_stream
    from smelt.runtime.backends.device import torch_device
    from smelt.runtime.models.streamed import open_streamed

    if not can_stream(settings) or torch_device(ctx.device) != "cpu":
        return None
    found = open_streamed(src.path, ctx.out, settings.dtype)
    if found is None or not all_inside(found.model, [n[0] for _, n in candidates(found.model, settings)]):
        return None
    return found


def _chosen(model: Any, settings: FactorizeSettings, ctx: Context) -> dict[nn.Linear, Sequence[str]]:
    """Return the layers that `settings` choose, with their names; none, warned of, where all are pairs.

    Raises:
        InputError: there are none.
    """
    chosen = dict(candidates(model, settings))
    thin = 0 if chosen else _thin(model, settings)
    if thin:
        ctx.warn(
            "already-factorized",
            f"No layer is factorized: all {thin} layers that include and exclude select are factorized"
            " already.",
        )
    elif not chosen:
        raise InputError(
            f"factorize: include {settings.include}, exclude {settings.exclude} choose no linear layer.",
            code="no-layer-selected",
        )
    return chosen


def _tell(
    layers: Mapping[str, nn.Linear],
    ranks: Mapping[str, int],
    limits: Mapping[str, float],
    unseen: Sequence[str],
    settings: FactorizeSettings,
    ctx: Context,
) -> None:
    """Say in the details and warnings which layers were left alone, and why."""
    alone = {n: _reason(layers[n], rank, limits[n]) for n, rank in ranks.items() if rank >= limits[n]}
    ctx.details["left_alone"] = alone | dict.fromkeys(unseen, "no row reaches it")
    if len(alone) == len(ranks):
        ctx.warn("no-rank-saves", _none_gains(len(layers), settings))


def _replace(
    model: Any,
    edits: list[Any],
    layers: Mapping[str, nn.Linear],
    ranks: Mapping[str, int],
    metrics: Metrics,
    ctx: Context,
) -> None:
    """Put pairs of `ranks` in the place of their layers; `ctx.details` says what that loses."""
    from smelt.compress.factorize.svd import thin_pair
    from smelt.runtime.models.structure import replace_layer

    errors: dict[str, float] = {}
    for at, (name, rank) in enumerate(ranks.items(), start=1):
        layer = layers[name]
        pair, error = thin_pair(layer, rank, metrics.of(name, layer), metrics.decomposed(name, layer))
        replace_layer(model, edits, name, pair, {"op": "low_rank", "module": name, "rank": rank})
        errors[name] = round(error, 4)
        ctx.progress(at, len(ranks), name)
    ctx.details.update(ranks=dict(ranks), relative_error=errors)


def _reason(layer: nn.Linear, rank: int, limit: float) -> str:
    from smelt.compress.factorize.ranks import saving

    rows, columns = layer.weight.shape
    if rank >= (smallest := saving(rows, columns)):
        said = f"saves nothing; it would have to be below {smallest:.1f}"
    elif limit > 1:
        said = f"would be slower in int8; it would have to be below {limit:.1f}"
    else:
        said = "would be slower in int8, as every rank would"
    return f"rank {rank} of {rows} x {columns} {said}"


def _none_gains(count: int, settings: FactorizeSettings) -> str:
    what, instead = "weights", ""
    if settings.optimize_for == "latency":
        what, instead = "time in int8", ", or set optimize_for: size to save weights"
    return (
        f"None of the {count} layers is factorized: no rank saves {what} with these settings."
        f" Lower energy, rank, keep_ratio or parameter_budget{instead}."
    )


def candidates(model: Any, settings: FactorizeSettings) -> Iterator[tuple[nn.Linear, Sequence[str]]]:
    """Yield the linear layers that the patterns choose, with their names.

    Halves of a pair and tied weights are none. A layer that stands in several places is there once: chosen
    under one of its names, excluded under none.
    """
    from torch import nn

    from smelt.runtime.layers.low_rank import LowRankEmbedding, LowRankLinear
    from smelt.runtime.models.structure import names_of

    halves = {id(h) for m in model.modules() if isinstance(m, LowRankLinear) for h in (m.up, m.down)}
    halves |= {id(m.up) for m in model.modules() if isinstance(m, LowRankEmbedding)}
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module, names in names_of(model).items():
        if not isinstance(module, nn.Linear) or id(module) in halves or id(module.weight) in tied:
            continue
        if _chooses(settings, names):
            yield module, names


def _chooses(settings: FactorizeSettings, names: Sequence[str]) -> bool:
    wanted = any(fnmatchcase(n, pattern) for n in names for pattern in settings.include)
    return wanted and not any(fnmatchcase(n, pattern) for n in names for pattern in settings.exclude)


def _thin(model: Any, settings: FactorizeSettings) -> int:
    """Return how many layers the patterns choose that an earlier step has factorized."""
    from smelt.runtime.layers.low_rank import LowRankLinear
    from smelt.runtime.models.structure import names_of

    found = names_of(model).items()
    return sum(isinstance(m, LowRankLinear) and _chooses(settings, names) for m, names in found)
