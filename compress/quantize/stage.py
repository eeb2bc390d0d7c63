"""The stage `quantize`: one scheme for linear layers, one for embeddings and the output layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.quantize.costs import quantize_cost
from smelt.compress.quantize.scheme_options import scheme_table, two_bit_warnings
from smelt.compress.quantize.settings import AUTO, QuantizeSettings
from smelt.core.artifact import Artifact, Format
from smelt.core.errors import InputError
from smelt.core.messages import Message, error_message, warning
from smelt.core.stage import Context, Need, Settings
from smelt.data.splits import TASKS, Task
from smelt.models.costs import CostInputs, StepCost
from smelt.models.families.registry import QUANTIZED_CONVOLUTIONS_KEY, no_blocks_reason
from smelt.quantization.scheme import Scheme
from smelt.quantization.schemes.registry import SCHEMES

if TYPE_CHECKING:
    from smelt.compress.quantize.plan_layers import PlannedLayer
    from smelt.models.edits import Edit

_MAX_LISTED = 3  # layers that a warning lists


class Quantize:
    """Quantize linear layers, convolutions and token embeddings.

    The torch model then computes like the exported one. A tied embedding and output layer stay tied. If a
    scheme needs training afterwards, put `distill` after this step: it runs quantization-aware training.

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
    def extra_help(cls) -> str:
        """Return the description of the schemes for `smelt stages quantize`."""
        return "\n\n".join([scheme_table(), *(_scheme_help(scheme) for scheme in SCHEMES.values())])

    @classmethod
    def provides(cls, settings: QuantizeSettings) -> frozenset[str]:
        """Return the properties of the result that later steps may destroy: optimized quantized weights."""
        plain = settings.method == "rtn" and settings.clip == "none"
        return frozenset() if plain else frozenset({"codes"})

    @classmethod
    def needs_with(cls, settings: QuantizeSettings, given: Collection[str]) -> frozenset[Need]:
        """Return the data that the settings need: calibration data if given, else train."""
        if not settings.needs_calibration:
            return frozenset()
        scored: set[Need] = (
            {"validation"}
            if settings.mixed_precision and settings.mixed_precision.max_drop is not None
            else set()
        )
        return frozenset(scored | ({"calibration"} if "calibration" in given else {"train"}))

    @classmethod
    def required_metrics(cls, settings: QuantizeSettings) -> list[tuple[str, str]]:
        """Return the settings that name a metric, with the metric, which the recipe has to score."""
        mixed = settings.mixed_precision
        metric = mixed.metric if mixed is not None else None
        return [("mixed_precision.metric", metric)] if metric is not None else []

    @classmethod
    def check_model(
        cls, settings: QuantizeSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the settings that do not fit a model of this config, and the config of the result."""
        lack = no_blocks_reason(config)
        if lack is None:
            return [], config
        found = convolution_setting_errors(settings, lack)
        return found, config if found else {**config, QUANTIZED_CONVOLUTIONS_KEY: True}

    @classmethod
    def estimate_cost(cls, settings: QuantizeSettings, inputs: CostInputs) -> StepCost:
        """Return the estimated cost of the step."""
        return quantize_cost(settings, inputs)

    @classmethod
    def lighter_settings(cls, settings: QuantizeSettings) -> Iterator[tuple[str, QuantizeSettings]]:
        """Yield settings that may need less memory, with their text: those that run block by block."""
        selects = settings.mixed_precision is not None or AUTO in settings.exclude
        if settings.sensitivity_samples and not selects:
            yield "sensitivity_samples: 0", settings.model_copy(update={"sensitivity_samples": 0})
        plain = QuantizeSettings(scheme=settings.scheme)
        if not plain.needs_calibration and plain != settings:
            yield f"quantize: {{scheme: {settings.scheme}, method: rtn}}", plain

    def __call__(self, src: Artifact, settings: QuantizeSettings, ctx: Context) -> None:
        """Quantize `src` into `ctx.out`; a large model block by block where the result is the same."""
        from smelt.compress.quantize.plan_layers import (
            cp_convolutions,
            is_convolutional,
            plan_layers,
            unused_patterns,
        )
        from smelt.models.checkpoint import load_model, save_model
        from smelt.models.edits import fold_batch_norms
        from smelt.models.empty_model import stored_dtypes
        from smelt.models.weight_files import is_large, weight_files_size
        from smelt.runtimes.device import torch_threads

        streamed = None
        if is_large(src.path):
            from smelt.compress.quantize.block_by_block import open_large_model, quantize_blocks

            streamed = open_large_model(src, settings, ctx)
        model, edits = (streamed.model, streamed.edits) if streamed else load_model(src.path)
        for mistake in self.check_model(settings, model.config.to_dict())[0]:
            raise InputError(f"quantize: {mistake.message}", code=mistake.code, setting=mistake.setting)
        if any(edit["op"] == "quantize" for edit in edits):
            raise InputError(
                f"{src.path}: this model is already quantized, and a model can be quantized only once."
                " Remove one of the quantize steps, or start from a float model.",
                code="already-quantized",
            )
        if is_convolutional(model):
            edits += fold_batch_norms(model)
            if floats := len(cp_convolutions(model)):
                ctx.warn(
                    "convolutions-kept-float",
                    f"{floats} convolutions from `factorize: {{method: cp}}` are kept in float,"
                    " because their channels cannot share one scale. With factorize:"
                    f" {{method: tucker}}, some of them are quantized.",
                )
        layers = plan_layers(model, settings)
        with torch_threads(ctx.threads):
            new = (
                quantize_blocks(streamed, layers, src, settings, ctx)
                if streamed
                else _quantize_whole(model, layers, src, settings, ctx)
            )
        if not any(edit["op"] == "quantize" for edit in new):
            raise InputError(
                f"quantize: exclude {settings.exclude} excludes all layers, so there is nothing to"
                " quantize. Remove some of the patterns.",
                code="no-layer-selected",
                setting="exclude",
            )
        kept = unused_patterns(model, settings.exclude_patterns)
        if kept:
            ctx.warn("unknown-layer", f"exclude: no layer matches {', '.join(kept)}. Check the patterns.")
        used = {edit["scheme"] for edit in new if edit["op"] == "quantize"}
        ctx.warnings.extend(two_bit_warnings(used) if settings.method == "hqq" else [])
        stored = stored_dtypes(src.path).default.itemsize
        ctx.details.update(quantization_details(model, stored), bytes_before=weight_files_size(src.path))
        ctx.warnings.extend(oversized_weight_warnings(model, stored))
        written = (
            streamed.finish(edits + new) if streamed else save_model(model, edits + new, ctx.out, src.path)
        )
        ctx.warnings.extend(written)
        ctx.details["bytes_after"] = weight_files_size(ctx.out)


def _quantize_whole(
    model: Any, layers: list[PlannedLayer], src: Artifact, settings: QuantizeSettings, ctx: Context
) -> list[Edit]:
    """Quantize `layers` of a model in memory; return the edits."""
    from smelt.compress.quantize.calibrate_layers import (
        calibrate_layers,
        insert_rounding,
        quantizer_factory,
        report_corrections,
    )
    from smelt.compress.quantize.plan_layers import quantize_layers
    from smelt.compress.quantize.ranges import scale_underflow_warnings, small_weights

    small = small_weights(layers)
    found = calibrate_layers(model, layers, src, settings, ctx)
    ctx.warnings.extend(scale_underflow_warnings(found.layers, small))
    codes = found.codes | {weight: pair.codes for weight, pair in found.corrections.items()}
    products = {weight: (pair.up, pair.down) for weight, pair in found.corrections.items()}
    new = quantize_layers(model, found.layers, found.ranges, quantizer_factory(settings, codes), products)
    if found.corrections:
        report_corrections(found, src, settings, ctx)
    between = insert_rounding(model, found.rounding_ranges) if found.rounding_ranges else []
    return found.edits + new + between


def convolution_setting_errors(settings: QuantizeSettings, lack: str) -> list[Message]:
    """Return errors about settings that convolutional networks do not support; lack: the reason."""
    fit = [name for name, scheme in SCHEMES.items() if scheme.supports_conv]
    take = f"{lack}. Use scheme: {' or '.join(fit)}, which quantizes convolutions."
    if settings.mixed_precision is not None:
        return [error_message("does-not-fit-model", take, setting="mixed_precision")]
    if settings.scheme not in fit:
        return [error_message("unsupported-scheme", take, setting="scheme")]
    alone = f"{lack}, and this setting applies only to linear layers. Remove it."
    asked = {
        "method": settings.method != "rtn",
        "smoothquant_alpha": settings.smoothquant_alpha is not None,
        "low_rank_correction": settings.correction is not None,
    }
    return [
        error_message("does-not-fit-model", alone, setting=name) for name, found in asked.items() if found
    ]


def _scheme_help(scheme: Scheme) -> str:
    other = scheme.embedding_scheme
    tables = f"; embeddings and output layer use {other} unless embedding_scheme is set" if other else ""
    packages = " and ".join(f"{name} {oldest}" for name, oldest in scheme.packages.items())
    needs = f"; needs the package {packages} or later" if packages else ""
    return f"{scheme.name}: {scheme.summary}{tables}{needs}."


def quantization_details(model: Any, stored: int) -> dict[str, Any]:
    """Return the report's details of a quantized model with `stored` bytes per float weight.

    `bits_per_weight` includes quantized weights, scales, zero points and low-rank corrections, each matrix
    once; `padded_layers` lists layers whose inputs are not a multiple of the group size.
    """
    from torch import nn

    from smelt.compress.quantize.plan_layers import quantized_weight_bits
    from smelt.quantization.layers import LowRankCorrectedLinear, QuantizedLinear, is_quantized
    from smelt.quantization.matrix import QuantizedConv2d

    adapter_modules = {
        id(h) for m in model.modules() if isinstance(m, LowRankCorrectedLinear) for h in m.adapter.modules()
    }
    layers = [(name, m) for name, m in model.named_modules() if is_quantized(m)]
    linears = [(name, m) for name, m in layers if isinstance(m, QuantizedLinear)]
    convolutions = sum(isinstance(m, QuantizedConv2d) for _, m in layers)
    return {
        "linear_layers": len(linears),
        **({"convolutions": convolutions} if convolutions else {}),
        "embeddings": len(layers) - len(linears) - convolutions,
        "float_linear_layers": [
            n for n, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) not in adapter_modules
        ],
        "padded_layers": [name for name, m in linears if _is_padded(m.matrix)],
        "bits_per_weight": quantized_weight_bits(model, stored),
    }


def oversized_weight_warnings(model: Any, stored: int) -> list[Message]:
    """Return a warning about matrices that do not become smaller by quantization.

    Their rows are much shorter than the group size, so most of each group is padding.

    Args:
        model: the quantized model.
        stored: bytes of a float weight in the file.
    """
    from torch import nn

    from smelt.models.empty_model import quantized_bytes
    from smelt.quantization.layers import is_quantized

    places: dict[int, tuple[str, Any]] = {}
    for name, m in model.named_modules():
        if is_quantized(m):
            places.setdefault(id(m.matrix), (name, m.matrix))
    vain = [
        n
        for n, m in places.values()
        if quantized_bytes(nn.ModuleList([m])) >= stored * len(m.codes) * m.width
    ]
    if not vain:
        return []
    return [
        warning(
            "no-size-reduction",
            f"Quantizing {len(vain)} of {len(places)} matrices saves nothing, because their rows are shorter"
            f" than a group ({', '.join(vain[:_MAX_LISTED])}{', ...' if len(vain) > _MAX_LISTED else ''})."
            " Use smaller groups or another scheme, or keep them in float with exclude.",
        )
    ]


def _is_padded(matrix: Any) -> bool:
    """Return whether the last group of a matrix is padded."""
    return bool(matrix.width % matrix.scheme.group_size(matrix.width, matrix.options))
