"""The stage `quantize`: one scheme for the linear layers, one for the matrices of the vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.quantize.from_schemes.table import scheme_table
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, mistake, warning
from smelt.core.stage import Context, Need, Settings
from smelt.families.registry import CODED_CONVOLUTIONS, blockless
from smelt.runtime.schemes.registry import SCHEMES
from smelt.runtime.schemes.scheme import Scheme

if TYPE_CHECKING:
    from smelt.compress.quantize.planned import Planned
    from smelt.runtime.models.structure import Edit

_NAMED = 3  # layers that a warning tells by name


class Quantize:
    """Turn linear layers and word embeddings into integer codes and scales.

    torch then computes what the runtime will compute. An embedding and an output head that are one matrix
    stay one. Where a scheme needs training afterwards, put `distill` after this step: it trains through the
    codes.

        - quantize: {scheme: int8-dynamic, exclude: ["*.lm_head"]}
        - quantize: {scheme: int8-dynamic, granularity: tensor}
        - quantize: {scheme: int4, group_size: 32, symmetric: false}
        - quantize: {scheme: int4, method: gptq, clip: mse}
        - quantize: {scheme: int4, method: awq, clip: awq}
        - quantize: {scheme: int2, method: awq-gptq}
        - quantize: {scheme: int4, method: hqq}
        - quantize: {scheme: int2, method: gptq, group_size: 32, symmetric: false}
        - quantize: {scheme: ternary, granularity: channel}
        - quantize: {scheme: int4, low_rank_correction: {rank: 32, iterations: 5}}
        - quantize: {scheme: binary, group_size: 64}
        - quantize: {scheme: int8-static, exclude: auto}
        - quantize: {scheme: int8-static, smoothquant_alpha: 0.5}
        - quantize: {scheme: int8-static}   # convolutions of a ResNet, too
        - quantize: {scheme: bnb-nf4}
        - quantize: {mixed_precision: {target_bits: 4.5}, method: gptq}
    """

    name: ClassVar[str] = "quantize"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "calibration", "validation"})
    source: ClassVar[str] = "; ".join(
        [
            *dict.fromkeys(scheme.source for scheme in SCHEMES.values()),
            "smoothquant_alpha: Xiao et al. 2023, arXiv:2211.10438",
            "gptq: Frantar et al. 2023, arXiv:2210.17323",
            "awq: Lin et al. 2023, arXiv:2306.00978",
            "hqq: Badri & Shaji 2023, https://mobiusml.github.io/hqq_blog/",
            "low_rank_correction: LoftQ, Li et al. 2023, arXiv:2310.08659; LQER, Zhang et al. 2024,"
            " arXiv:2402.02446;"
            " QERA, Zhang et al. 2024, arXiv:2410.06040; SVDQuant, Li et al. 2024, arXiv:2411.05007",
        ]
    )
    version: ClassVar[int] = 5
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = QuantizeSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def more_help(cls) -> str:
        """Return what `smelt stages quantize` says of the schemes."""
        return "\n\n".join([scheme_table(), *(_help_of(scheme) for scheme in SCHEMES.values())])

    @classmethod
    def leaves(cls, settings: QuantizeSettings) -> frozenset[str]:
        """Return what later steps may lose: codes that are not the nearest."""
        plain = settings.method == "rtn" and settings.clip == "none"
        return frozenset() if plain else frozenset({"codes"})

    @classmethod
    def needs_with(cls, settings: QuantizeSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs: rows where activations are looked at, for calibration if there are any."""
        if not settings.reads_rows:
            return frozenset()
        scored: set[Need] = (
            {"validation"}
            if settings.mixed_precision and settings.mixed_precision.max_drop is not None
            else set()
        )
        return frozenset(scored | ({"calibration"} if "calibration" in given else {"train"}))

    @classmethod
    def metrics_named(cls, settings: QuantizeSettings) -> list[tuple[str, str]]:
        """Return the metrics that are asked for by name, with the setting: the recipe must score them."""
        mixed = settings.mixed_precision
        metric = mixed.metric if mixed is not None else None
        return [("mixed_precision.metric", metric)] if metric is not None else []

    @classmethod
    def check_model(
        cls, settings: QuantizeSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        lack = blockless(config)
        if lack is None:
            return [], config
        found = unfit_for_convolutions(settings, lack)
        return found, config if found else {**config, CODED_CONVOLUTIONS: True}

    def __call__(self, src: Artifact, settings: QuantizeSettings, ctx: Context) -> None:
        """Quantize `src` into `ctx.out`; a large model block by block, where each code is the same so."""
        from smelt.compress.quantize.block_by_block import open_large, quantize_blocks
        from smelt.compress.quantize.from_schemes.two_bits import two_bits
        from smelt.compress.quantize.planned import of_convolutions, plan_layers, separated, unused_patterns
        from smelt.compress.train.state import threads
        from smelt.runtime.models.checkpoint import load_model, save_model
        from smelt.runtime.models.edits.fold_norms import fold_batch_norms
        from smelt.runtime.models.stored_dtype import stored_types, weight_bytes

        streamed = open_large(src, settings, ctx)
        model, edits = (streamed.model, streamed.edits) if streamed else load_model(src.path)
        for one in self.check_model(settings, model.config.to_dict())[0]:
            raise InputError(f"quantize: {one.message}", code=one.code, setting=one.setting)
        if any(edit["op"] == "quantize" for edit in edits):
            raise InputError(
                f"{src.path}: this model is already quantized; quantize it once, after all other steps.",
                code="already-quantized",
            )
        if of_convolutions(model):
            edits += fold_batch_norms(model)
            if floats := len(separated(model)):
                ctx.warn(
                    "convolutions-kept-float",
                    f"{floats} convolutions that `factorize: {{method: cp}}` made stay float: one scale does"
                    " not fit their channels. With method: tucker some become int8.",
                )
        layers = plan_layers(model, settings)
        with threads(ctx.threads):
            new = (
                quantize_blocks(streamed, layers, src, settings, ctx)
                if streamed
                else _quantize_whole(model, layers, src, settings, ctx)
            )
        if not any(edit["op"] == "quantize" for edit in new):
            raise InputError(
                f"quantize: the patterns in exclude {settings.exclude} leave no layer to quantize.",
                code="no-layer-selected",
                setting="exclude",
            )
        kept = unused_patterns(model, settings.patterns)
        if kept:
            ctx.warn("unknown-layer", f"exclude: no layer matches {', '.join(kept)}.")
        used = {edit["scheme"] for edit in new if edit["op"] == "quantize"}
        ctx.warnings.extend(two_bits(used) if settings.method == "hqq" else [])
        stored = stored_types(src.path).common.itemsize
        ctx.details.update(facts_of(model, stored), bytes_before=weight_bytes(src.path))
        ctx.warnings.extend(codes_that_save_nothing(model, stored))
        written = (
            streamed.finish(edits + new) if streamed else save_model(model, edits + new, ctx.out, src.path)
        )
        ctx.warnings.extend(written)
        ctx.details["bytes_after"] = weight_bytes(ctx.out)


def _quantize_whole(
    model: Any, layers: list[Planned], src: Artifact, settings: QuantizeSettings, ctx: Context
) -> list[Edit]:
    """Quantize `layers` of a model that is in memory; return the edits that make room for the result."""
    from smelt.compress.quantize.convolutions import round_between
    from smelt.compress.quantize.decided import coders, decide, tell_of_pairs
    from smelt.compress.quantize.from_schemes.faint import faint, faint_warnings
    from smelt.compress.quantize.planned import quantize_layers

    small = faint(layers)
    found = decide(model, layers, src, settings, ctx)
    ctx.warnings.extend(faint_warnings(found.layers, small))
    codes = found.codes | {weight: pair.codes for weight, pair in found.pairs.items()}
    products = {weight: (pair.up, pair.down) for weight, pair in found.pairs.items()}
    new = quantize_layers(model, found.layers, found.ranges, coders(settings, codes), products)
    if found.pairs:
        tell_of_pairs(found, src, settings, ctx)
    between = round_between(model, found.between) if found.between else []
    return found.edits + new + between


def unfit_for_convolutions(settings: QuantizeSettings, lack: str) -> list[Message]:
    """Return what of the settings no network of convolutions can have, by setting; lack: what it has not."""
    fit = [name for name, scheme in SCHEMES.items() if scheme.convolutions]
    take = f"{lack}; take scheme: {' or '.join(fit)}, which codes convolutions."
    if settings.mixed_precision is not None:
        return [mistake("does-not-fit-model", take, setting="mixed_precision")]
    if settings.scheme not in fit:
        return [mistake("unsupported-scheme", take, setting="scheme")]
    alone = f"{lack}, and this is of linear layers; leave it out."
    asked = {
        "method": settings.method != "rtn",
        "smoothquant_alpha": settings.smoothquant_alpha is not None,
        "low_rank_correction": settings.correction is not None,
    }
    return [mistake("does-not-fit-model", alone, setting=name) for name, found in asked.items() if found]


def _help_of(scheme: Scheme) -> str:
    other = scheme.vocabulary
    tables = f"; embeddings and output layer become {other} unless embedding_scheme is given" if other else ""
    packages = " and ".join(f"{name} {oldest}" for name, oldest in scheme.packages.items())
    needs = f"; needs the package {packages} or later" if packages else ""
    return f"{scheme.name}: {scheme.summary}{tables}{needs}."


def facts_of(model: Any, stored: int) -> dict[str, Any]:
    """Return what the report should tell of a quantized model, of which a float weight takes `stored` bytes.

    `bits_per_weight` counts codes, scales, zero points and pairs of low rank of the quantized matrices, each
    once; `padded_layers` are those whose last group is filled up, their inputs being no multiple of it.
    """
    from torch import nn

    from smelt.compress.quantize.coding import coded_bits
    from smelt.runtime.layers.adapted import AdaptedLinear
    from smelt.runtime.layers.quantized import QuantizedLinear, is_quantized
    from smelt.runtime.layers.quantized_conv import QuantizedConv2d

    beside = {id(h) for m in model.modules() if isinstance(m, AdaptedLinear) for h in m.adapter.modules()}
    layers = [(name, m) for name, m in model.named_modules() if is_quantized(m)]
    linears = [(name, m) for name, m in layers if isinstance(m, QuantizedLinear)]
    convolutions = sum(isinstance(m, QuantizedConv2d) for _, m in layers)
    return {
        "linear_layers": len(linears),
        **({"convolutions": convolutions} if convolutions else {}),
        "embeddings": len(layers) - len(linears) - convolutions,
        "float_linear_layers": [
            n for n, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) not in beside
        ],
        "padded_layers": [name for name, m in linears if _is_padded(m.matrix)],
        "bits_per_weight": coded_bits(model, stored),
    }


def codes_that_save_nothing(model: Any, stored: int) -> list[Message]:
    """Return a warning where codes and scales of a matrix take what its weights took.

    That is where rows are much shorter than the group that each of them fills up.

    Args:
        model: quantized.
        stored: bytes of a float weight in the file.
    """
    from torch import nn

    from smelt.runtime.layers.quantized import is_quantized, matrix_bytes

    places: dict[int, tuple[str, Any]] = {}
    for name, m in model.named_modules():
        if is_quantized(m):
            places.setdefault(id(m.matrix), (name, m.matrix))
    vain = [
        n for n, m in places.values() if matrix_bytes(nn.ModuleList([m])) >= stored * len(m.codes) * m.width
    ]
    if not vain:
        return []
    return [
        warning(
            "no-size-reduction",
            f"Quantizing {len(vain)} of {len(places)} matrices saves nothing, because their rows are shorter"
            f" than a group ({', '.join(vain[:_NAMED])}{', ...' if len(vain) > _NAMED else ''}). Use smaller"
            " groups or another scheme, or keep them float with exclude.",
        )
    ]


def _is_padded(matrix: Any) -> bool:
    """Say whether the last group of a matrix is filled up."""
    return bool(matrix.width % matrix.scheme.group(matrix.width, matrix.options))
