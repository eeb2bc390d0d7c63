"""The stage `quantize`: one scheme for linear layers, one for embeddings and the output layer; its sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping
from itertools import zip_longest
from typing import Any, ClassVar

from smelt.compress.quantize.methods import BLOCK_METHODS
from smelt.compress.quantize.scheme_settings import MODEL_PARTS, simulated_activation_warnings
from smelt.compress.quantize.settings import QuantizeSettings, two_bit_warnings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, error_message, warning, with_article
from smelt.models.families.limits import no_blocks_reason
from smelt.models.families.registry import QUANTIZED_CONVOLUTIONS_KEY, find_family
from smelt.models.model_size import ModelSize, SizeInputs, StepSize, is_streamed, one_shot_size
from smelt.quantization.scheme import OptionValue, Scheme
from smelt.quantization.schemes.registry import (
    SCHEMES,
    bits_per_weight,
    default_options,
    format_option,
    supported_targets,
)
from smelt.stage import Context, Need, Settings, Stage

_MAX_LISTED = 3  # layers that a warning lists


class Quantize(Stage[QuantizeSettings]):
    """Quantize linear layers, convolutions and token embeddings.

    The torch model then computes like the exported one. A tied embedding and output layer stay tied. If a
    scheme needs training afterwards, put `distill` after this step: it runs quantization-aware training.

        - quantize: {scheme: int8-dynamic, exclude: ["*.lm_head"]}
        - quantize: {scheme: int8-dynamic, granularity: tensor}
        - quantize: {scheme: int4, group_size: 32, symmetric: false}
        - quantize: {scheme: int4, method: gptq}
        - quantize: {scheme: int4, group_size: 32, clip: mse}
        - quantize: {scheme: int4, method: awq, clip: awq}
        - quantize: {scheme: int2, method: awq-gptq}
        - quantize: {scheme: int2, method: autoround}
        - quantize: {scheme: int4, method: hqq}
        - quantize: {scheme: additive, method: aqlm}
        - quantize: {scheme: int2, method: gptq, group_size: 32, symmetric: false}
        - quantize: {scheme: ternary, granularity: channel}
        - quantize: {scheme: int4, low_rank_correction: {rank: 32, iterations: 5}}
        - quantize: {scheme: binary, group_size: 64}
        - quantize: {scheme: int8-static, exclude: auto}
        - quantize: {scheme: int8-static, activations_symmetric: true}   # TensorRT
        - quantize: {scheme: int8-static, smoothquant_alpha: 0.5}
        - quantize: {scheme: int8-static}   # convolutions of a ResNet, too
        - quantize: {scheme: bnb-nf4}
        - quantize: {mixed_precision: {target_bits: 4.5}, method: gptq}
        - quantize: {scheme: {encoder: int8-dynamic, decoder: int4}}
    """

    name: ClassVar[str] = "quantize"
    may_need: ClassVar[frozenset[Need]] = frozenset({"train", "calibration", "validation"})
    source: ClassVar[str] = "; ".join(
        [
            *dict.fromkeys(scheme.source for scheme in SCHEMES.values()),
            "smoothquant_alpha: Xiao et al. 2023, arXiv:2211.10438",
            "gptq: Frantar et al. 2023, arXiv:2210.17323",
            "gptaq_alpha: Li et al. 2025, arXiv:2504.02692",
            "awq: Lin et al. 2023, arXiv:2306.00978",
            *(f"{name}: {method.source}" for name, method in BLOCK_METHODS.items()),
            "hqq: Badri & Shaji 2023, https://mobiusml.github.io/hqq_blog/",
            "low_rank_correction: LoftQ, Li et al. 2023, arXiv:2310.08659; LQER, Zhang et al. 2024,"
            " arXiv:2402.02446;"
            " QERA, Zhang et al. 2024, arXiv:2410.06040; SVDQuant, Li et al. 2024, arXiv:2411.05007",
        ]
    )
    version: ClassVar[int] = 14
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = QuantizeSettings

    @classmethod
    def extra_help(cls) -> str:
        """Return the description of the schemes for `smelt stages quantize`."""
        return "\n\n".join([scheme_table(), *(_scheme_help(scheme) for scheme in SCHEMES.values())])

    @classmethod
    def provides(cls, settings: QuantizeSettings) -> frozenset[str]:
        """Return the properties of the result that later steps may destroy: optimized quantized weights."""
        is_plain_rtn = settings.method == "rtn" and settings.clip == "none"
        return frozenset() if is_plain_rtn else frozenset({"codes"})

    @classmethod
    def poor_order(cls, settings: QuantizeSettings, earlier: Mapping[str, Settings]) -> str | None:
        """Return that rotations were learned for another scheme or other options."""
        # RotateSettings, which import these settings
        rotation: Any = earlier.get("rotate")
        learned = None if rotation is None else rotation.learned
        if learned is None or len(settings.linear_schemes) > 1:
            return None
        wanted, learned_for = (
            {"scheme": s.linear_schemes[0], **s.scheme_options(s.linear_schemes[0])}
            for s in (settings, learned.quantization)
        )
        different = {name: value for name, value in wanted.items() if learned_for.get(name) != value}
        if not different:
            return None
        text = ", ".join(f"{name}: {value}" for name, value in different.items())
        return f"The rotations were learned for other weights. Set rotate: {{learned: {{{text}}}}}."

    @classmethod
    def needs_with(cls, settings: QuantizeSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data that the settings need: calibration data if available, else train."""
        if not settings.needs_calibration:
            return frozenset()
        extra: set[Need] = (
            {"validation"}
            if settings.mixed_precision and settings.mixed_precision.max_degradation is not None
            else set()
        )
        return frozenset(extra | ({"calibration"} if "calibration" in available else {"train"}))

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
        if missing := missing_part_error(settings, config):
            return [missing], config
        reason = no_blocks_reason(config)
        if reason is None:
            return [], config
        errors = convolution_setting_errors(settings, reason, config)
        quantizes_convolutions = not errors and SCHEMES[settings.linear_schemes[0]].supports_conv
        quantizes_convolutions = quantizes_convolutions and config.get("convolutions") != 0
        return errors, {**config, QUANTIZED_CONVOLUTIONS_KEY: True} if quantizes_convolutions else config

    @classmethod
    def estimate_size(cls, settings: QuantizeSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step."""
        return quantize_size(settings, inputs)

    @classmethod
    def lighter_settings(cls, settings: QuantizeSettings) -> Iterator[tuple[str, QuantizeSettings]]:
        """Yield settings that may need less memory, with their text: those that run block by block."""
        if settings.num_sensitivity_samples and not settings.chooses_by_sensitivity:
            yield "sensitivity_samples: 0", settings.model_copy(update={"sensitivity_samples": 0})
        rtn = QuantizeSettings(scheme=settings.scheme)
        if not rtn.needs_calibration and rtn != settings:
            yield f"quantize: {{scheme: {settings.scheme_text}, method: rtn}}", rtn

    def __call__(self, src: Artifact, settings: QuantizeSettings, ctx: Context) -> None:
        """Quantize `src` into `ctx.out`; a large model block by block where the result is the same."""
        from smelt.compress.quantize.plan_layers import (
            cp_convolutions,
            is_convolutional,
            plan_layers,
            unused_patterns,
        )
        from smelt.compress.quantize.sequential import SequentialQuantizer, open_large_model
        from smelt.models.checkpoint import load_model, save_model
        from smelt.models.edits import fold_batch_norms
        from smelt.models.empty_model import stored_dtypes
        from smelt.models.weight_files import is_large, weight_files_size
        from smelt.runtimes.device import torch_threads

        streamed = None
        if is_large(src.path):
            streamed = open_large_model(src, settings, ctx)
        model, edits = (streamed.model, streamed.edits) if streamed else load_model(src.path)
        for error in self.check_model(settings, model.config.to_dict())[0]:
            raise InputError(f"quantize: {error.message}", code=error.code, setting=error.setting)
        if any(edit["op"] == "quantize" for edit in edits):
            raise InputError(
                f"{src.path}: this model is already quantized, and a model can be quantized only once."
                " Remove one of the quantize steps, or start from a float model.",
                code="already-quantized",
            )
        if is_convolutional(model):
            edits += fold_batch_norms(model)
            if num_float := len(cp_convolutions(model)):
                ctx.warn(
                    "convolutions-kept-float",
                    f"{num_float} convolutions from `factorize: {{method: cp}}` are kept in float,"
                    " because their channels cannot share one scale. With factorize:"
                    f" {{method: tucker}}, some of them are quantized.",
                )
        layers = plan_layers(model, settings)
        with torch_threads(ctx.threads):
            quantize_edits = SequentialQuantizer(model, layers, src, settings, ctx, streamed).quantize()
        if not any(edit["op"] == "quantize" for edit in quantize_edits):
            raise InputError(
                f"quantize: exclude {settings.exclude} excludes all layers, so there is nothing to"
                " quantize. Remove some of the patterns.",
                code="no-layer-selected",
                setting="exclude",
            )
        unmatched = unused_patterns(model, settings.exclude_patterns)
        if unmatched:
            ctx.warn(
                "unknown-layer", f"exclude: no layer matches {', '.join(unmatched)}. Check the patterns."
            )
        used = {edit["scheme"] for edit in quantize_edits if edit["op"] == "quantize"}
        ctx.warnings.extend(two_bit_warnings(used) if settings.method == "hqq" else [])
        options = {name: settings.scheme_options(name) for name in sorted(used)}
        ctx.warnings.extend(simulated_activation_warnings(options))
        stored = stored_dtypes(src.path).default.itemsize
        ctx.details.update(quantization_details(model, stored), bytes_before=weight_files_size(src.path))
        if not isinstance(settings.scheme, str):
            ctx.details["bits_per_weight_by_part"] = bits_per_weight_by_part(model, stored)
        ctx.warnings.extend(oversized_weight_warnings(model, stored) + storage_warnings(model))
        written = (
            streamed.finish(edits + quantize_edits)
            if streamed
            else save_model(model, edits + quantize_edits, ctx.out, src.path)
        )
        ctx.warnings.extend(written)
        ctx.details["bytes_after"] = weight_files_size(ctx.out)


def missing_part_error(settings: QuantizeSettings, config: Mapping[str, Any]) -> Message | None:
    """Return an error if `scheme` names parts that a model of this config does not have, else None."""
    family = find_family(config)
    if isinstance(settings.scheme, str) or family is None or len(family.stacks(config)) == len(MODEL_PARTS):
        return None
    text = (
        f"{with_article(family.name)} model does not have an {' and a '.join(MODEL_PARTS)}, which scheme"
        f" {settings.scheme_text} names. Set one scheme."
    )
    return error_message("unknown-part", text, setting="scheme")


def convolution_setting_errors(
    settings: QuantizeSettings, lack: str, config: Mapping[str, Any]
) -> list[Message]:
    """Return errors about settings that a model without blocks does not support; lack: the reason."""
    supported, (scheme,) = [s.name for s in SCHEMES.values() if s.supports_conv], settings.linear_schemes[:1]
    scheme_text = f"{lack}. Use scheme: {' or '.join(supported)}, which quantizes convolutions."
    if settings.mixed_precision is not None:
        return [error_message("does-not-fit-model", scheme_text, setting="mixed_precision")]
    if scheme not in supported and config.get("linear_layers") == 0:  # a user's module
        text = (
            "the module has no linear layer to quantize except its output layer, and"
            f" {scheme} quantizes no convolutions. Use scheme: {' or '.join(supported)}."
        )
        return [error_message("only-output-layer", text, setting="scheme")]
    family = find_family(config)
    has_linear_layers = config.get("linear_layers") or (family is not None and family.has_linear_blocks)
    if scheme not in supported and not has_linear_layers:
        return [error_message("unsupported-scheme", scheme_text, setting="scheme")]
    output_layers = config.get("linear_output_layers") if settings.quantizes_output_layer else 0
    if config.get("linear_layers") == config.get("convolutions") == output_layers == 0:
        text = (
            "the module has no layer to quantize: of type nn.Linear or nn.Conv2d, called by the module, and"
            " not the output layer if output_layer is false. Remove this step."
        )
        return [error_message("no-layer-selected", text)]
    linear_only_text = f"{lack}, and this setting applies only to linear layers of such blocks. Remove it."
    linear_settings = {
        "method": settings.method != "rtn",
        "smoothquant_alpha": settings.smoothquant_alpha is not None,
        "low_rank_correction": settings.correction is not None,
    }
    errors = [
        error_message("does-not-fit-model", linear_only_text, setting=name)
        for name, is_set in linear_settings.items()
        if is_set
    ]
    options = settings.scheme_options(scheme)
    if options.get("symmetric") is False and options.get("granularity") != "tensor":
        text = (
            "releases of ONNX Runtime take only one zero point for all kernels of a convolution (QLinearConv,"
            " ConvInteger). Set granularity: tensor, or symmetric: true."
        )
        errors.append(error_message("channel-zero-points", text, setting="symmetric"))
    return errors


def _scheme_help(scheme: Scheme) -> str:
    embedding_scheme = scheme.embedding_scheme
    tables = (
        f"; embeddings and output layer use {embedding_scheme} unless embedding_scheme is set"
        if embedding_scheme
        else ""
    )
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
    from smelt.models.layers import LowRankCorrectedLinear
    from smelt.quantization.layers import QuantizedConv2d, QuantizedLinear, is_quantized

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


def bits_per_weight_by_part(model: Any, stored: int) -> dict[str, float]:
    """Return the bits per weight of the linear layers of encoder and decoder, and of embeddings.

    The output layer counts as an embedding. stored: bytes of a float weight.
    """
    from torch import nn

    from smelt.compress.quantize.plan_layers import output_layer, quantized_weight_bits
    from smelt.quantization.layers import QuantizedEmbedding, is_quantized

    encoder, head = set(model.get_encoder().modules()), output_layer(model)
    modules: dict[str, list[Any]] = {"encoder": [], "decoder": [], "embeddings": []}
    for module in filter(is_quantized, model.modules()):
        is_table = isinstance(module, QuantizedEmbedding) or module is head
        part = "embeddings" if is_table else "encoder" if module in encoder else "decoder"
        modules[part].append(module)
    return {
        part: quantized_weight_bits(nn.ModuleList(members), stored)
        for part, members in modules.items()
        if members
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

    unique: dict[int, tuple[str, Any]] = {}
    for name, m in model.named_modules():
        if is_quantized(m):
            unique.setdefault(id(m.matrix), (name, m.matrix))
    names = [
        n
        for n, m in unique.values()
        if quantized_bytes(nn.ModuleList([m])) >= stored * len(m.codes) * m.width
    ]
    if not names:
        return []
    return [
        warning(
            "no-size-reduction",
            f"Quantizing {len(names)} of {len(unique)} matrices saves nothing, because their rows are shorter"
            f" than a group ({', '.join(names[:_MAX_LISTED])}{', ...' if len(names) > _MAX_LISTED else ''})."
            " Use smaller groups or another scheme, or keep them in float with exclude.",
        )
    ]


def storage_warnings(model: Any) -> list[Message]:
    """Return the warnings of the schemes about the sizes of their matrices."""
    from smelt.quantization.layers import is_quantized

    matrices = {id(m.matrix): m.matrix for m in model.modules() if is_quantized(m)}
    by_scheme: dict[str, list[Any]] = {}
    for matrix in matrices.values():
        by_scheme.setdefault(matrix.scheme.name, []).append(matrix)
    return [
        message for name, members in by_scheme.items() for message in SCHEMES[name].storage_warnings(members)
    ]


def _is_padded(matrix: Any) -> bool:
    """Return whether the last group of a matrix is padded."""
    return bool(matrix.width % matrix.scheme.group_size(matrix.width, matrix.options))


# columns and their widths; with two spaces before each, 79 in total
_COLUMNS = {"scheme": 14, "bits": 4, "data": 4, "training": 8, "runtimes": 16, "pays": 21}


def scheme_table() -> str:
    """Return the table, each line indented by two spaces, and an explanation of its columns."""
    rows = [list(_COLUMNS), *(_row_cells(scheme) for scheme in SCHEMES.values())]
    lines = [line for row in rows for line in _wrap_row(row)]
    explanation = (
        "bits: per weight, scales and zero points included, with the default options. data:"
        " calibration samples. training: whether training after quantization is needed. runtimes: targets of"
        f" `onnx`; torch runs all schemes. pays: where the scheme is useful.{_restricted_schemes()}"
    )
    return "\n".join(lines) + "\n\n" + explanation


def _restricted_schemes() -> str:
    """Return sentences about schemes that a runtime supports only with certain options."""
    names: dict[tuple[str, str], list[str]] = {}
    for scheme in SCHEMES.values():
        for target, only in scheme.required_options.items():
            needed = " and ".join(format_option(*option) for option in only.items())
            names.setdefault((target, needed), []).append(scheme.name)
    sentences = [
        f" For {target}, {', '.join(schemes)} need{'s' if len(schemes) == 1 else ''} {needed}."
        for (target, needed), schemes in names.items()
    ]
    return "".join(sentences).replace("`", "")


def _row_cells(scheme: Scheme) -> list[str]:
    return [
        scheme.name,
        f"{bits_per_weight(scheme, default_options(scheme)):.3g}",
        "yes" if scheme.requires_calibration else "none",
        "needed" if scheme.requires_training else "none",
        ", ".join(supported_targets([scheme])) or "torch only",
        scheme.recommended_for,
    ]


def _wrap_row(cells: list[str]) -> list[str]:
    """Return the lines of a table row, with cells wrapped to their column widths."""
    wrapped = [
        textwrap.wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(cells, _COLUMNS.values(), strict=True)
    ]
    return [
        "".join(f"  {part:{width}}" for part, width in zip(parts, _COLUMNS.values(), strict=True)).rstrip()
        for parts in zip_longest(*wrapped, fillvalue="")
    ]


def quantized_size(settings: QuantizeSettings, size: ModelSize) -> ModelSize:
    """Return the size of the quantized model in files: weights, scales and zero points of each matrix."""
    if settings.mixed_precision is not None:
        mixed = settings.mixed_precision
        widths = [settings.scheme_options(SCHEMES[name].name) for name in settings.used_schemes()]
        bits = mixed.target_bits or max(
            bits_per_weight(SCHEMES[name], options)
            for name, options in zip(settings.used_schemes(), widths, strict=True)
        )
        return size.stored_as(bits / 8, bits / 8)
    if not size.stacks:  # convolutions
        scheme = settings.linear_schemes[0]
        bytes_per_weight = bits_per_weight(SCHEMES[scheme], settings.scheme_options(scheme)) / 8
        return size.stored_as(bytes_per_weight, bytes_per_weight)
    stored = weights = 0.0
    for stack in size.stacks:
        scheme = settings.scheme_of("encoder" if stack.name == "encoder_layers" else "decoder")
        options = settings.scheme_options(scheme)
        for rows, columns in stack.matrices:
            weights += stack.layers * rows * columns
            stored += stack.layers * rows * columns * _bytes(scheme, options, columns, rows)
    if settings.correction is not None:
        rank = settings.correction.rank
        stored += (
            size.bytes_per_weight
            * rank
            * sum(stack.layers * (n + m) for stack in size.stacks for n, m in stack.matrices)
        )
    other_bytes = size.other_weights * size.table_bytes_per_weight
    table = settings.resolved_embedding_scheme
    bytes_per_weight = _bytes(table, settings.scheme_options(table), size.width)
    for num_weights, is_quantized in (
        (size.table_weights, settings.quantizes_embeddings),
        (size.head_weights, settings.quantizes_output_layer),
    ):
        other_bytes += num_weights * (bytes_per_weight if is_quantized else size.table_bytes_per_weight)
    num_other = size.table_weights + size.head_weights + size.other_weights
    return size.stored_as(stored / max(1.0, weights), other_bytes / max(1, num_other))


def _bytes(scheme: str, options: Mapping[str, OptionValue], columns: int, rows: int | None = None) -> float:
    return bits_per_weight(SCHEMES[scheme], options, columns, rows) / 8


def works_by_block(settings: QuantizeSettings, inputs: SizeInputs) -> bool:
    """Return whether a large model is quantized block by block (see `open_large_model`)."""
    smooths_norms = settings.smoothquant_alpha is not None and "norms" in settings.smoothquant_targets
    # the encoder's last norm has readers in every block of the decoder
    scales_norms = settings.scales_inputs or smooths_norms
    needs_whole = settings.loads_whole_model or (scales_norms and inputs.source.is_encoder_decoder)
    return not needs_whole and not (settings.needs_calibration and inputs.is_gpu)


def quantize_size(settings: QuantizeSettings, inputs: SizeInputs) -> StepSize:
    """Return the sizes of `quantize` with these settings: the float weights, and the quantized ones."""
    result, streamed = quantized_size(settings, inputs.result), works_by_block(settings, inputs)
    by_block = streamed and is_streamed(inputs.source)
    samples = settings.calibration_samples if settings.needs_calibration else 1
    more = 0 if by_block else result.stored_bytes
    return one_shot_size(inputs, result=result, more_bytes=more, streamed=streamed, samples=samples)
