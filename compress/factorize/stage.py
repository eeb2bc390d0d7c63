"""The stage `factorize`: replace linear layers, convolutions and embeddings by low-rank factors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.model_input import load_float_model
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, error_message, with_article
from smelt.data.splits import Split, missing_labels_errors
from smelt.data.tasks import Task
from smelt.models.model_size import SizeInputs, StepSize, one_shot_size
from smelt.stage import Context, Need, Settings, Stage

if TYPE_CHECKING:
    from torch import nn

    from smelt.compress.factorize.svd import LayerMetrics
    from smelt.models.streamed_model import StreamedModel

# About the part of the weights that `energy` or a rank keeps; layers that gain nothing are kept whole.
_USUAL_RATIO = 0.85


class Factorize(Stage[FactorizeSettings]):
    """Replace linear layers by two low-rank factors.

    The best factors of rank r (Eckart & Young 1936) come from the singular value decomposition. The
    methods minimize different errors: of the layer's outputs on samples (whitened-svd), of its
    weights (svd), of weights times the magnitudes of inputs (asvd), of weights times the gradients
    of the loss (fwsvd). The error is the square root of the sum of the dropped squared singular
    values. A layer of m by n has r (m + n) weights afterwards, in one linear layer more. With
    optimize_for: latency a layer is kept unless its factors are faster, by a rule measured in ONNX
    Runtime's int8: r (m + n) < 0.9 m n - 5,000 in an encoder, < 0.9 m n - 100,000 in a decoder, which
    computes one token per step. With optimize_for: size it is kept unless r < m n / (m + n). The
    report lists kept layers and the reasons. parameter_budget distributes ranks over all layers. With
    targets: [embeddings] the token embedding becomes a thin table and a linear layer; a tied output
    layer uses the same table.

    Convolutions are factorized by Tucker-2 (1 x 1 convolution, a smaller kernel, 1 x 1 convolution)
    or by CP (one convolution per axis), with ranks by keep_ratio, energy, or VBMF, which estimates
    the rank above noise. One is kept unless its operations (or weights) decrease. Recover quality
    with distill.

        - factorize: {targets: [embeddings], rank: 128}
        - factorize: {parameter_budget: 0.7, optimize_for: size}
        - factorize: {method: svd, keep_ratio: 0.6, include: ["*.fc1", "*.fc2"]}
        - factorize: {method: tucker, keep_ratio: 0.5}    # convolutions
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "factorize"
    may_need: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = (
        "svd: Eckart & Young 1936, Psychometrika 1(3), Denton et al. 2014, arXiv:1404.0736; whitened-svd:"
        " SVD-LLM, Wang et al. 2024, arXiv:2403.07378; asvd: Yuan et al. 2023, arXiv:2312.05821; fwsvd:"
        " Hsu et al. 2022, arXiv:2207.00112; tucker: Kim et al. 2016, arXiv:1511.06530; cp: Lebedev et al."
        " 2015, arXiv:1412.6553; vbmf: Nakajima et al. 2013, JMLR 14; embeddings: ALBERT, Lan et al. 2020,"
        " arXiv:1909.11942"
    )
    version: ClassVar[int] = 10
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[FactorizeSettings]] = FactorizeSettings

    @classmethod
    def poor_order(cls, settings: FactorizeSettings, earlier: Mapping[str, Settings]) -> str | None:
        """Return that factorized matrices have no zeros."""
        if "sparsify" not in earlier:
            return None
        return (
            "Factorized matrices are dense, so the zeros of sparsify are lost. Remove sparsify or factorize."
        )

    @classmethod
    def needs_with(cls, settings: FactorizeSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data that the step needs: calibration data, else training data, if it uses samples."""
        has_samples = bool({"calibration", "train"} & set(available))
        counts = settings.of_embeddings and settings.frequency_weighted is None and has_samples
        if not settings.needs_calibration and not counts:
            return frozenset()
        return frozenset({"calibration"} if "calibration" in available else {"train"})

    @classmethod
    def check_rows(cls, settings: FactorizeSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return the errors for these samples: fwsvd of a sentence embedder needs scores for its loss."""
        if settings.method != "fwsvd":
            return []
        names = ("calibration",) if "calibration" in data else ("train",)
        return missing_labels_errors(task, data, names, instead=("method", "whitened-svd"))

    @classmethod
    def check_model(
        cls, settings: FactorizeSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the errors, by setting, for a model of this config, and the config of the result."""
        from smelt.models.families.limits import no_blocks_reason
        from smelt.models.families.registry import find_family

        family, reason = find_family(config), no_blocks_reason(config)
        if family is not None and family.is_user_module and not settings.of_embeddings:
            return _user_module_errors(settings, config), config
        if (
            settings.of_embeddings
            and family is not None
            and (family.input_kind != "texts" or family.is_user_module)
        ):
            text = f"{with_article(family.name)} model has no known token embedding; remove targets."
            return [error_message("does-not-fit-model", text, setting="targets")], config
        if family is not None and settings.for_convolutions and family.input_kind != "images":
            kind = with_article(family.name)
            text = f"{kind} model has no convolutions; use whitened-svd."
            return [error_message("does-not-fit-model", text, setting="method")], config
        if family is not None and not family.has_dense_kernels:
            text = f"{with_article(family.name)} model has depthwise convolutions; remove factorize."
            return [error_message("does-not-fit-model", text)], config
        if reason is not None and not settings.for_convolutions:
            text = f"{reason}; use tucker or cp for its convolutions."
            return [error_message("does-not-fit-model", text, setting="method")], config
        return [], config

    @classmethod
    def estimate_size(cls, settings: FactorizeSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step."""
        streamed = not settings.of_embeddings and settings.parameter_budget is None and not inputs.is_gpu
        streamed = streamed and settings.method in ("svd", "whitened-svd", "asvd")
        ratio = settings.keep_ratio or settings.parameter_budget or _USUAL_RATIO
        result = inputs.result if settings.of_embeddings else inputs.result.scaled_blocks(ratio)
        size = one_shot_size(inputs, result=result, streamed=streamed)
        by_tokens = settings.calibration_samples is None and settings.needs_calibration
        by_tokens = by_tokens and not settings.of_embeddings and settings.method != "fwsvd"
        return replace(size, calibration_tokens=inputs.source.calibration_tokens) if by_tokens else size

    def __call__(self, src: Artifact, settings: FactorizeSettings, ctx: Context) -> None:
        """Factorize the layers of `src` that gain from it and write the model to `ctx.out`."""
        from smelt.runtimes.device import torch_threads

        with torch_threads(ctx.threads):
            (self._factorize_convolutions if settings.for_convolutions else self._factorize)(
                src, settings, ctx
            )

    def _factorize_convolutions(self, src: Artifact, settings: FactorizeSettings, ctx: Context) -> None:
        from smelt.compress.factorize.convolutions import factorize_convolutions
        from smelt.models.checkpoint import save_model
        from smelt.models.families.registry import reads_arrays
        from smelt.runtimes.images import DEFAULT_IMAGE_SIZE, read_processor

        model, edits = load_float_model(src, self.name)
        for error in self.check_model(settings, model.config.to_dict())[0]:
            raise InputError(f"factorize: {error.message}", code=error.code, setting=error.setting)
        size = None if reads_arrays(model.config.to_dict()) else read_processor(src.path).shape
        factorize_convolutions(model, edits, size or (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE), settings, ctx)
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))

    def _factorize(self, src: Artifact, settings: FactorizeSettings, ctx: Context) -> None:
        from smelt.models.checkpoint import count_stored_parameters, save_model

        streamed = _open_streamed(src, settings, ctx)
        if streamed is not None:
            self._factorize_streamed(streamed, src, settings, ctx)
            return
        model, edits = load_float_model(src, self.name)
        for error in self.check_model(settings, model.config.to_dict())[0]:
            raise InputError(f"factorize: {error.message}", code=error.code, setting=error.setting)
        ctx.details["parameters_before"] = count_stored_parameters(model)
        if settings.of_embeddings:
            from smelt.compress.factorize.embeddings import factorize_embeddings

            factorize_embeddings(model, edits, src, settings, ctx)
        else:
            self._factorize_layers(model, edits, src, settings, ctx)
        ctx.details["parameters_after"] = count_stored_parameters(model)
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))

    def _factorize_layers(
        self, model: Any, edits: list[Any], src: Artifact, settings: FactorizeSettings, ctx: Context
    ) -> None:
        from smelt.compress.factorize.ranks import choose_ranks, rank_limits
        from smelt.compress.factorize.svd import collect_metrics

        names_by_layer = _layers_to_factorize(model, settings, ctx)
        if not names_by_layer:
            return
        limits = rank_limits(model, names_by_layer, settings)
        layers = {names[0]: layer for layer, names in names_by_layer.items()}
        with collect_metrics(model, layers, src, settings, ctx) as metrics:
            for name in metrics.uncalibrated:
                layers.pop(name)
            ranks = choose_ranks(model, layers, limits, metrics, settings, ctx)
            pairs = {name: rank for name, rank in ranks.items() if rank < limits[name]}
            _replace_layers(model, edits, layers, pairs, metrics, ctx)
        _report_kept_layers(layers, ranks, limits, metrics.uncalibrated, settings, ctx)

    def _factorize_streamed(
        self, streamed: StreamedModel, src: Artifact, settings: FactorizeSettings, ctx: Context
    ) -> None:
        """Factorize a large model block by block, from file to file."""
        from smelt.compress.factorize.block_by_block import factorize_blocks
        from smelt.compress.factorize.ranks import rank_limits
        from smelt.models.checkpoint import count_stored_parameters

        model = streamed.model
        for error in self.check_model(settings, model.config.to_dict())[0]:
            raise InputError(f"factorize: {error.message}", code=error.code, setting=error.setting)
        ctx.details["parameters_before"] = count_stored_parameters(model)
        names_by_layer = _layers_to_factorize(model, settings, ctx)
        limits = rank_limits(model, names_by_layer, settings)
        layers = {names[0]: layer for layer, names in names_by_layer.items()}
        ranks, uncalibrated = factorize_blocks(streamed, list(layers), limits, src, settings, ctx)
        if names_by_layer:
            _report_kept_layers(
                {n: m for n, m in layers.items() if n in ranks}, ranks, limits, uncalibrated, settings, ctx
            )
        ctx.details["parameters_after"] = count_stored_parameters(model)
        ctx.warnings.extend(streamed.finish(streamed.edits))


def _user_module_errors(settings: FactorizeSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return an error if a PyTorch module of the user's own has no layers that the method factorizes."""
    if settings.for_convolutions and not config.get("convolutions"):
        text = "the module has no convolutions; use whitened-svd for its linear layers."
    elif not settings.for_convolutions and not config.get("linear_layers"):
        text = "the module has no linear layers but its output layer; use tucker for its convolutions."
    else:
        return []
    return [error_message("does-not-fit-model", text, setting="method")]


def _open_streamed(src: Artifact, settings: FactorizeSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model for block-by-block work, else None; a budget and gradients need it whole."""
    from smelt.compress.factorize.block_by_block import are_all_in_blocks, can_factorize_blockwise
    from smelt.models.streamed_model import open_streamed
    from smelt.runtimes.device import torch_device

    if not can_factorize_blockwise(settings) or torch_device(ctx.device) != "cpu":
        return None
    streamed = open_streamed(src.path, ctx.out, settings.dtype)
    if streamed is None or not are_all_in_blocks(
        streamed.model, [n[0] for _, n in linear_candidates(streamed.model, settings)]
    ):
        return None
    return streamed


def _layers_to_factorize(
    model: Any, settings: FactorizeSettings, ctx: Context
) -> dict[nn.Linear, Sequence[str]]:
    """Return the layers that `settings` select, by name; empty, with a warning, if all are factorized.

    Raises:
        InputError: the patterns select no layer.
    """
    selected = dict(linear_candidates(model, settings))
    num_factorized = 0 if selected else _count_factorized(model, settings)
    if num_factorized:
        ctx.warn(
            "already-factorized",
            f"No layer is factorized: all {num_factorized} layers that include and exclude select are already"
            " factorized. Change the patterns, or remove the step.",
        )
    elif not selected:
        raise InputError(
            f"factorize: include {settings.include} and exclude {settings.exclude} select no linear"
            " layer. Change the patterns.",
            code="no-layer-selected",
        )
    return selected


def _report_kept_layers(
    layers: Mapping[str, nn.Linear],
    ranks: Mapping[str, int],
    limits: Mapping[str, float],
    unseen: Sequence[str],
    settings: FactorizeSettings,
    ctx: Context,
) -> None:
    """Report in details and warnings which layers are kept, and why."""
    kept_reasons = {
        n: _kept_reason(layers[n], rank, limits[n]) for n, rank in ranks.items() if rank >= limits[n]
    }
    ctx.details["left_alone"] = kept_reasons | dict.fromkeys(unseen, "no calibration sample reaches it")
    if len(kept_reasons) == len(ranks):
        ctx.warn("no-rank-saves", _no_gain_text(len(layers), settings))


def _replace_layers(
    model: Any,
    edits: list[Any],
    layers: Mapping[str, nn.Linear],
    ranks: Mapping[str, int],
    metrics: LayerMetrics,
    ctx: Context,
) -> None:
    """Replace layers by factors of the given `ranks`; report their errors in `ctx.details`."""
    from smelt.compress.factorize.svd import low_rank_layer
    from smelt.models.edits import replace_layer

    errors: dict[str, float] = {}
    for index, (name, rank) in enumerate(ranks.items(), start=1):
        layer = layers[name]
        metric, judged = metrics.metric_of(name, layer), metrics.judged_metric_of(name, layer)
        pair, error = low_rank_layer(layer, rank, metric, metrics.decompose(name, layer), judged)
        replace_layer(model, edits, name, pair, {"op": "low_rank", "module": name, "rank": rank})
        errors[name] = round(error, 4)
        ctx.progress(index, len(ranks), name)
    ctx.details.update(ranks=dict(ranks), relative_error=errors)


def _kept_reason(layer: nn.Linear, rank: int, limit: float) -> str:
    from smelt.compress.factorize.ranks import smaller_below_rank

    rows, columns = layer.weight.shape
    if rank >= (smallest := smaller_below_rank(rows, columns)):
        reason = f"saves no weights; the rank must be below {smallest:.1f}"
    elif limit > 1:
        reason = f"would be slower in int8; the rank must be below {limit:.1f}"
    else:
        reason = "would be slower in int8, as every rank would"
    return f"rank {rank} of {rows} x {columns} {reason}"


def _no_gain_text(count: int, settings: FactorizeSettings) -> str:
    saved, remedy = "weights", ""
    if settings.optimize_for == "latency":
        saved, remedy = "time in int8", ", or set optimize_for: size to save weights"
    return (
        f"None of the {count} layers is factorized: no rank saves {saved} with these settings."
        f" Lower energy, rank, keep_ratio or parameter_budget{remedy}."
    )


def linear_candidates(model: Any, settings: FactorizeSettings) -> Iterator[tuple[nn.Linear, Sequence[str]]]:
    """Yield the linear layers that the patterns select, with their names.

    Factors and tied weights are skipped. A layer with several names comes once: one of its names must match
    include, none exclude.
    """
    from torch import nn

    from smelt.models.edits import module_names
    from smelt.models.layers import LowRankEmbedding, LowRankLinear
    from smelt.models.user_module import kept_linear_layers

    excluded_layers = kept_linear_layers(model)
    halves = {id(h) for m in model.modules() if isinstance(m, LowRankLinear) for h in (m.up, m.down)}
    halves |= {id(m.up) for m in model.modules() if isinstance(m, LowRankEmbedding)}
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module, names in module_names(model).items():
        if not isinstance(module, nn.Linear) or id(module) in halves or id(module.weight) in tied:
            continue
        if module not in excluded_layers and _is_selected(settings, names):
            yield module, names


def _is_selected(settings: FactorizeSettings, names: Sequence[str]) -> bool:
    included = any(fnmatchcase(n, pattern) for n in names for pattern in settings.include)
    return included and not any(fnmatchcase(n, pattern) for n in names for pattern in settings.exclude)


def _count_factorized(model: Any, settings: FactorizeSettings) -> int:
    """Return the number of selected layers that an earlier step has factorized."""
    from smelt.models.edits import module_names
    from smelt.models.layers import LowRankLinear

    modules = module_names(model).items()
    return sum(isinstance(m, LowRankLinear) and _is_selected(settings, names) for m, names in modules)
