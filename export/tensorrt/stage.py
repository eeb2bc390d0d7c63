"""The stage `tensorrt`: build one engine per ONNX graph, for the lengths and batch sizes of the data.

For third-party graphs, ranges are by axis, independent of axis names. For inputs of texts axis 0 is the batch
and axis 1 the length. For arrays one axis is the batch; every other axis without a fixed size gets the size
of the samples in the data.

Lengths and sizes come from the data or the recipe; ONNX Runtime's options for TensorRT have them too. Source
of these: ONNX Runtime's documentation, "TensorRT Execution Provider"; its parser requires `True` and `False`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact, Format
from smelt.core.errors import InputError, RunError
from smelt.core.files import load_json
from smelt.core.messages import Message
from smelt.data.splits import Example, input_texts
from smelt.data.tasks import GRAPH_TASKS, Task, task_traits, tasks_with
from smelt.export.settings import FIXED_SIZES, ProviderSettings, TensorrtSettings
from smelt.export.tensorrt.build_engine import (
    BuildOptions,
    ProfileShapes,
    SizeRange,
    build_engine,
    causal_ranges,
    input_range,
    past_range,
    profile_shapes,
    timing_cache_path,
)
from smelt.export.tensorrt.preflight import TensorrtProblem, check_profile, load_graph, preflight
from smelt.models.model_size import SizeInputs, StepSize, one_shot_size
from smelt.models.text_rules import max_input_length, position_limit, window_length
from smelt.runtimes.tensorrt_engine import (
    EngineSidecar,
    current_gpu,
    external_data_files,
    graph_hash,
    import_tensorrt,
    record_built_engine,
    write_sidecar,
)
from smelt.stage import Context, Need, Settings, Stage


class TensorrtStage(Stage[TensorrtSettings]):
    """Build a TensorRT engine for each ONNX graph.

    The input is an export with `onnx: {target: tensorrt}`, or a third-party ONNX
    model that a recipe starts from. Its dtype and quantization are also the
    engine's, because TensorRT 11 has no precision settings. The file is checked
    first, because TensorRT silently builds some wrong graphs. Sizes come from the
    data: batch 1 to `max_batch_size`, lengths 1 to the 99th percentile, fastest
    at the median. An engine runs on the kind of GPU that built it, unless
    `hardware_compatibility` is set. `NAME.plan.json` next to each engine records
    how it was built. Where the engines can run, their outputs are compared with
    those of the ONNX graphs.

        - tensorrt: {optimization_level: 4, max_batch_size: 16}
        - tensorrt:
            profiles:
              - {max_batch_size: 1, length_percentile: 50}
              - {max_batch_size: 16}
          optional: true      # without TensorRT the step is skipped
    """

    name: ClassVar[str] = "tensorrt"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "tensorrt"
    needs: ClassVar[frozenset[Need]] = frozenset({"tensorrt"})
    source: ClassVar[str] = "NVIDIA TensorRT 11 documentation, https://docs.nvidia.com/deeplearning/tensorrt"
    version: ClassVar[int] = 6
    settings_type: ClassVar[type[Settings]] = TensorrtSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(GRAPH_TASKS) - frozenset(
        tasks_with(modality="image-and-text")
    )

    @classmethod
    def estimate_size(cls, settings: TensorrtSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step: the graph and the engine."""
        return one_shot_size(inputs, more_bytes=inputs.source.stored_bytes)

    def __call__(self, src: Artifact, settings: TensorrtSettings, ctx: Context) -> None:
        """Write `NAME.plan` for every `NAME.onnx` of `src`, with config and tokenizer.

        Raises:
            InputError: the ONNX file was exported for another target, or no lengths are known.
            MissingDependencyError: TensorRT is not installed.
            RunError: the preflight found an error, or TensorRT rejected the graph (with node and hint).
            ParityError: an engine's outputs differ from its graph's.
        """
        target, is_imported = (src.manifest.details.get(detail_key) for detail_key in ("target", "foreign"))
        if target != "tensorrt" and not is_imported:
            raise InputError(
                f"{src.path}: this ONNX model was exported for '{target}', but tensorrt needs target"
                " tensorrt. Put `- onnx: {target: tensorrt}` before this step, with `from:` set to the"
                " step to export.",
                code="unsupported-target",
            )
        if sizes := {n: src.manifest.details[n] for n in FIXED_SIZES if n in src.manifest.details}:
            raise InputError(
                f"{src.path}: this ONNX model has fixed shapes ({sizes}), and an engine of this step is built"
                f" for a range of sizes. Build it with `trtexec --onnx=model.onnx`, or export it without"
                f" {' and '.join(sizes)}.",
                code="fixed-shapes",
            )
        trt = import_tensorrt()
        make_ranges = partial(profile_ranges, cache_length=src.manifest.details.get("cache_length"))
        profiles, limit = (imported_ranges if is_imported else make_ranges)(src.path, settings, ctx)
        graphs = plan_graphs(
            src.path, profiles, limit, ctx.warnings, imported_shapes if is_imported else profile_shapes
        )
        options = _build_options(trt, settings)
        summaries: dict[str, dict[str, Any]] = {}
        for path, shapes in graphs.items():
            built = build_engine(trt, path, shapes, options, ctx.progress)
            target_path = ctx.out / f"{path.stem}.plan"
            target_path.write_bytes(built.plan)
            write_sidecar(target_path, _engine_sidecar(trt, path, built.plan, shapes, options))
            summaries[path.stem] = {"network": built.network}
            if built.kernels is not None:
                summaries[path.stem]["kernels"] = built.kernels
            record_built_engine(target_path)
            for warning in built.warnings[:5]:
                ctx.warn(warning.code, f"TensorRT: {warning.message[:300]}", file=path.name)
            if options.weights == "stripped":
                copy_graph(path, ctx.out)
        _copy_other_files(src.path, ctx.out)
        from smelt.export.tensorrt.engine_parity import check_engines

        if parity := check_engines(src, ctx.out, settings.tf32, ctx):
            ctx.details["parity"] = parity
        copied_details = ("parameters", "dtype", "scheme", "foreign", "cache_length")
        ctx.details.update({k: src.manifest.details[k] for k in copied_details if k in src.manifest.details})
        ctx.details.update(
            target="tensorrt",
            tensorrt=f"{trt.__name__} {trt.__version__}",
            engines=summaries,
            profile=_as_lists(profiles[largest_profile(profiles)]),
        )
        if len(profiles) > 1:
            ctx.details["profiles"] = [_as_lists(ranges) for ranges in profiles]


def plan_graphs(
    folder: Path,
    profiles: Sequence[Mapping[str, SizeRange]],
    limit: int | None,
    warnings: list[Message],
    shapes_for: Callable[[Any, Mapping[str, SizeRange], str], ProfileShapes] = profile_shapes,
) -> dict[Path, list[ProfileShapes]]:
    """Return the shapes to build each ONNX graph for, by profile, after all passed the preflight.

    shapes_for: the function that computes the shapes of a graph's inputs from the ranges.

    Raises:
        RunError: with every error of every graph.
    """
    graphs: dict[Path, list[ProfileShapes]] = {}
    problems: list[TensorrtProblem] = []
    for path in sorted(folder.glob("*.onnx")):
        model = load_graph(path)
        problems += preflight(model, path)
        graphs[path] = [shapes_for(model, ranges, path.name) for ranges in profiles]
        profile_problems = [
            problem for shapes in graphs[path] for problem in check_profile(model, shapes, limit)
        ]
        problems += [problem._replace(graph=path.name) for problem in dict.fromkeys(profile_problems)]
    if not graphs:
        raise RunError(
            f"{folder}: no .onnx file in this folder. Put an onnx step before tensorrt.",
            code="missing-graph",
            file=str(folder),
        )
    messages = [problem.as_message() for problem in problems]
    warnings.extend(problem for problem in messages if problem.severity == "warning")
    errors = [problem for problem in messages if problem.severity == "error"]
    if errors:
        error_lines = [*map(str, errors[:20])] + [f"... and {len(errors) - 20} more"] * (len(errors) > 20)
        raise RunError(
            "TensorRT does not support this graph:\n  " + "\n  ".join(error_lines),
            code="unsupported-graph",
            messages=errors,
        )
    return graphs


def _build_options(trt: Any, settings: TensorrtSettings) -> BuildOptions:
    cache = None
    if settings.timing_cache:
        import platform

        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no gpu"
        cache = timing_cache_path(trt, f"{gpu} {platform.node()}")
    return BuildOptions(
        settings.workspace_mib, settings.optimization_level, settings.tf32,
        settings.hardware_compatibility, settings.version_compatible, cache, settings.weights,
        settings.weight_streaming,
    )  # fmt: skip


def _engine_sidecar(
    trt: Any, path: Path, plan: bytes, profiles: Sequence[ProfileShapes], options: BuildOptions
) -> EngineSidecar:
    """Return the metadata of an engine: how and from what it was built, and for which shapes."""
    return EngineSidecar(
        package=trt.__name__,
        version=trt.__version__,
        gpu=current_gpu(),
        graph=path.name,
        graph_sha256=graph_hash(path),
        size_bytes=len(plan),
        weights=options.weights,
        version_compatible=options.version_compatible,
        hardware_compatibility=options.hardware_compatibility,
        flags={
            "tf32": options.tf32,
            "optimization_level": options.optimization_level,
            "weight_streaming": options.weight_streaming,
        },
        profiles=[
            {name: [list(sizes) for sizes in input_shapes] for name, input_shapes in shapes.items()}
            for shapes in profiles
        ],
    )


def _as_lists(ranges: Mapping[str, SizeRange]) -> dict[str, list[int]]:
    return {name: [r.min, r.opt, r.max] for name, r in ranges.items()}


def copy_graph(path: Path, out: Path) -> None:
    """Copy a graph and its weight file, from which a stripped engine reads weights."""
    shutil.copyfile(path, out / path.name)
    for file in external_data_files(path):
        copy = out / file.relative_to(path.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _copy_other_files(src: Path, out: Path) -> None:
    """Copy configs, signature and tokenizer: all files that are not a graph or its weights."""
    from smelt.export.parity.references import RUNNER_FILES
    from smelt.models.checkpoint import copy_tokenizer

    for name in RUNNER_FILES:
        if (src / name).is_file():
            shutil.copyfile(src / name, out / name)
    copy_tokenizer(src, out)


DimensionRanges = dict[str, SizeRange]
# Tokenizing more examples does not change a percentile noticeably.
_MAX_EXAMPLES = 5000
_SPLIT_ORDER = ("train", "calibration", "validation")


def profile_ranges(
    folder: Path,
    settings: TensorrtSettings,
    ctx: Context,
    setting_path: str = "tensorrt: {%s}",
    cache_length: int | None = None,
) -> tuple[list[DimensionRanges], int | None]:
    """Return the range of each dimension (batch, input, past) for each profile, and the position limit.

    For images only the batch varies. Profiles are those of the recipe, in its order. setting_path: where such
    settings are in a recipe, used in messages. cache_length: of caches that do not grow.

    Raises:
        InputError: there are no data to compute lengths from and no lengths are set, or no profile covers all
            others.
    """
    config = load_json(folder / "config.json")
    limit = min(filter(None, (position_limit(config), cache_length)), default=None)
    parts = settings.each_profile()
    if ctx.traits.modality == "image":
        ranges: list[DimensionRanges] = [{"batch": _batch_range(part)} for part in parts]
    elif ctx.traits.architecture == "decoder":
        ranges = _decoder_only_ranges(folder, config, parts, limit or 10**6, ctx)
    else:
        ranges = _text_ranges(folder, parts, limit or 10**6, ctx, setting_path)
    largest_profile(ranges)
    return ranges, limit


def largest_profile(profiles: Sequence[Mapping[str, SizeRange]]) -> int:
    """Return the index of the profile that covers all others.

    Raises:
        InputError: none does, so that a large batch of long texts would not fit any profile.
    """
    for profile_index, profile in enumerate(profiles):
        if all(profile[name].max >= other[name].max for other in profiles for name in profile):
            return profile_index
    profile_texts = "; ".join(
        ", ".join(f"{name} up to {size.max}" for name, size in profile.items()) for profile in profiles
    )
    raise InputError(
        f"tensorrt: no profile covers all others ({profile_texts}), so a large batch of long texts "
        "would not fit"
        " any. Add one with the largest max_batch_size and the longest lengths.",
        code="no-covering-profile",
        setting="profiles",
    )


def _batch_range(settings: TensorrtSettings) -> SizeRange:
    return SizeRange(1, settings.opt_batch_size, settings.max_batch_size)


def _row_range(settings: TensorrtSettings) -> SizeRange:
    """Return the range of the rows of a decoder: texts by beams."""
    beams = settings.num_beams or 1
    return SizeRange(1, settings.opt_batch_size * beams, settings.max_batch_size * beams)


def _decoder_only_ranges(
    folder: Path, config: dict[str, Any], parts: Sequence[TensorrtSettings], limit: int, ctx: Context
) -> list[DimensionRanges]:
    """Return the ranges of a decoder-only graph; the cache is as long in each as the longest text."""
    prompts = [_max_prompt_length(folder, config, part, ctx) for part in parts]
    opt_lengths = [part.lengths.opt if part.lengths is not None and len(parts) > 1 else 1 for part in parts]
    longest = parts[0].max_new_tokens or max_output_tokens(folder, ctx.task)
    return [
        {"batch": _batch_range(part), "rows": _row_range(part)}
        | causal_ranges(prompt, longest, limit, max(prompts), opt)
        for part, prompt, opt in zip(parts, prompts, opt_lengths, strict=True)
    ]


def _text_ranges(
    folder: Path, parts: Sequence[TensorrtSettings], limit: int, ctx: Context, under: str
) -> list[DimensionRanges]:
    """Return the ranges of a graph that reads whole texts, and of the decoder after it if there is one."""
    examples = _sample_examples(ctx)
    if not examples and any(part.lengths is None for part in parts):
        raise InputError(
            "tensorrt: there is no train, calibration or validation data to compute text lengths from."
            f" Add some to the recipe, or set {under % 'lengths: {opt: 32, max: 128}'}.",
            code="missing-data",
        )
    lengths, outputs = _token_lengths(folder, examples, ctx.task)
    profiles: list[DimensionRanges] = []
    for part in parts:
        ranges = {"batch": _batch_range(part), "input": _input_range(part, lengths, limit)}
        if ctx.traits.architecture == "encoder-decoder":
            longest = part.max_new_tokens or max_output_tokens(folder, ctx.task)
            ranges["past"] = past_range(outputs or lengths or [2], longest, limit)
            ranges["rows"] = _row_range(part)
        profiles.append(ranges)
    max_length = max(ranges["input"].max for ranges in profiles)
    num_longer = sum(n > max_length for n in lengths)
    if num_longer:
        verb = "is" if num_longer == 1 else "are"
        ctx.warn(
            "longer-than-engine",
            f"{num_longer:,} of {len(lengths):,} texts {verb} longer than the {max_length} tokens of "
            "the engine and"
            f" would be truncated. Increase {under % 'length_percentile, lengths'}.",
        )
    return profiles


def _sample_examples(ctx: Context) -> list[Example]:
    examples = [
        e for split_name in _SPLIT_ORDER if split_name in ctx.data for e in ctx.data[split_name].examples
    ]
    return examples[:: max(1, len(examples) // _MAX_EXAMPLES)]


def _input_range(settings: TensorrtSettings, lengths: Sequence[int], limit: int) -> SizeRange:
    if settings.lengths is not None:
        return SizeRange(1, settings.lengths.opt, settings.lengths.max)
    return input_range(lengths, settings.length_percentile, limit)


def max_output_tokens(folder: Path, task: Task) -> int:
    """Return the maximum number of new tokens of the model in `folder`, if no number is requested.

    `max_length` counts the prompt too: a decoder's one start token, or a text. If the text alone is longer,
    generation uses its own default.
    """
    from smelt.generation.config import MAX_NEW_TOKENS, GenerationConfig

    files = (folder / "generation_config.json", folder / "config.json")
    generation_config = json.loads(next(path for path in files if path.is_file()).read_text(encoding="utf-8"))
    limits = {
        n: generation_config[n]
        for n in ("max_new_tokens", "max_length")
        if isinstance(generation_config.get(n), int)
    }
    longest = GenerationConfig.model_validate(limits).max_total_length(1) - 1
    has_prompt = task_traits(task).architecture == "decoder" and "max_new_tokens" not in limits
    return max(longest, MAX_NEW_TOKENS) if has_prompt else longest


def _max_prompt_length(folder: Path, config: dict[str, Any], settings: TensorrtSettings, ctx: Context) -> int:
    """Return the largest number of input tokens: `lengths: {max}`, else the window of cut texts.

    For text generation it is the percentile of the prompts' lengths, of the data if there are any.
    """
    if settings.lengths is not None:
        return settings.lengths.max
    from smelt.models.checkpoint import load_tokenizer

    if ctx.traits.samples == "prompts":
        examples = _sample_examples(ctx)
        lengths, _ = _token_lengths(folder, examples, ctx.task)
        if lengths:
            limit = max_input_length(load_tokenizer(folder), config)
            return input_range(lengths, settings.length_percentile, limit).max
    windows = next((ctx.data[name].windows for name in _SPLIT_ORDER if name in ctx.data), None)
    return window_length(windows, max_input_length(load_tokenizer(folder), config))


def _token_lengths(folder: Path, examples: Sequence[Example], task: Task) -> tuple[list[int], list[int]]:
    """Return the lengths in tokens of the inputs, and of the references if texts are generated."""
    if not examples:
        return [], []
    from smelt.models.checkpoint import load_tokenizer
    from smelt.models.tokenizer import encode_texts

    tokenizer = load_tokenizer(folder)
    texts, pairs = input_texts(examples, task)
    inputs = [len(ids) for ids in encode_texts(texts, tokenizer, 10**9, pairs).ids]
    if task_traits(task).architecture != "encoder-decoder":
        return inputs, []
    references = [e.references[0] for e in examples if e.references]
    targets = tokenizer(text_target=references, verbose=False)["input_ids"] if references else []
    return inputs, [len(ids) for ids in targets]


_THIRD_PARTY_SPLIT_ORDER = ("calibration", "validation", "train")


def imported_ranges(
    folder: Path, settings: TensorrtSettings, ctx: Context
) -> tuple[list[DimensionRanges], int | None]:
    """Return for each profile the range of the batch, and of each further axis of each input by `NAME.AXIS`.

    Raises:
        InputError: an axis has no fixed size, and there are no samples that a stage may use.
    """
    if ctx.traits.modality != "arrays":
        return profile_ranges(folder, settings, ctx)
    from smelt.runtimes.onnx_import.signature import read_signature

    arrays = next(
        (ctx.data[array_axis].arrays for array_axis in _THIRD_PARTY_SPLIT_ORDER if array_axis in ctx.data),
        None,
    )
    sizes: DimensionRanges = {}
    batches: list[str] = []
    for value in read_signature(folder).inputs:
        for axis, length in enumerate(value.shape or ()):
            if isinstance(length, int):
                continue
            if axis == value.axis:
                batches += [f"{value.name}.{axis}"] if axis else []  # axis 0 is the batch for texts too
                continue
            if arrays is None:
                raise InputError(
                    f"tensorrt: the input '{value.name}' has dynamic axes, and there are no calibration"
                    " samples to take their sizes from. Add data: {calibration: FILE.npz}.",
                    code="no-calibration-data",
                )
            # a sample has no batch axis
            sample_axis = axis if value.axis is None or axis < value.axis else axis - 1
            num_shapes = arrays.num_samples if arrays.max_batch_size == 1 else 1  # others have one shape
            samples = [arrays.sample(index)[value.name] for index in range(num_shapes)]
            lengths = sorted(int(sample.shape[sample_axis]) for sample in samples)
            sizes[f"{value.name}.{axis}"] = SizeRange(lengths[0], lengths[len(lengths) // 2], lengths[-1])
    profiles: list[DimensionRanges] = []
    for part in settings.each_profile():
        batch = SizeRange(1, part.opt_batch_size, part.max_batch_size)
        profiles.append({"batch": batch, **dict.fromkeys(batches, batch), **sizes})
    largest_profile(profiles)
    return profiles, None


def imported_shapes(model: Any, ranges: Mapping[str, SizeRange], graph: str) -> ProfileShapes:
    """Return min, opt and max shape of every input of an ONNX model with an axis without a fixed size.

    Raises:
        RunError: an input has more such axes than texts have.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes: ProfileShapes = {}
    for value in model.graph.input:
        sizes = value.type.tensor_type.shape.dim
        if value.name in weights or all(d.dim_value > 0 for d in sizes):
            continue
        axes = [_axis_range(value.name, axis, size, ranges, graph) for axis, size in enumerate(sizes)]
        shapes[value.name] = (
            tuple(r.min for r in axes), tuple(r.opt for r in axes), tuple(r.max for r in axes),
        )  # fmt: skip
    return shapes


def _axis_range(name: str, axis: int, size: Any, ranges: Mapping[str, SizeRange], graph: str) -> SizeRange:
    if size.dim_value > 0:
        return SizeRange(size.dim_value, size.dim_value, size.dim_value)
    size_range = ranges.get(f"{name}.{axis}") or (ranges.get("batch") if axis == 0 else None)
    size_range = size_range or (ranges.get("input") if axis == 1 else None)
    if size_range is None:
        raise RunError(
            f"{graph}: axis {axis} of input '{name}' is dynamic, and no size is known for it. Export the"
            " graph with a fixed size.",
            code="unknown-axis-size",
            file=graph,
        )
    return size_range


_QDQ_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def export_provider_options(
    dtype: str, settings: ProviderSettings, source: Path, ctx: Context
) -> dict[str, Any]:
    """Write `provider.json` next to the finished graphs in `ctx.out`; return the sizes for the manifest.

    Args:
        dtype: of the graphs.
        settings: of their engines.
        source: the folder of the model, with config and tokenizer.
        ctx: with the data that lengths are computed from.

    Raises:
        InputError: there are no data to compute lengths from, and no lengths are set.
        RunError: the sizes do not fit a graph.
    """
    from smelt.runtimes.ort_tensorrt_backend import ProviderOptions, write_provider_options

    [ranges], limit = profile_ranges(source, settings.as_tensorrt_settings(), ctx, "onnx: {engine: {%s}}")
    options: dict[str, ProviderOptions] = {}
    for path in sorted(ctx.out.glob("*.onnx")):
        model = load_graph(path)
        shapes = profile_shapes(model, ranges, path.name)
        wrong = [p.as_message() for p in check_profile(model, shapes, limit) if p.severity == "error"]
        if wrong:
            text = f"{path.name}: TensorRT in ONNX Runtime does not support these sizes:\n  " + "\n  ".join(
                map(str, wrong)
            )
            raise RunError(text, code="does-not-fit-model", file=path.name, messages=wrong)
        has_quantization = any(node.op_type in _QDQ_OPS for node in model.graph.node)
        options[path.stem] = ProviderOptions(
            graph_hash(path), tensorrt_options(settings, dtype, has_quantization, shapes)
        )
    write_provider_options(ctx.out, options)
    return {name: [r.min, r.opt, r.max] for name, r in ranges.items()}


def tensorrt_options(
    settings: ProviderSettings, dtype: str, quantized: bool, shapes: ProfileShapes
) -> dict[str, str]:
    """Return the options of TensorRT's provider for one graph.

    The provider builds weakly typed networks: a precision is used only if an option allows it, and norms in
    float32 have an option of their own.

    Args:
        settings: of the engines.
        dtype: fp32, fp16 or bf16, of the graph.
        quantized: whether the graph has QuantizeLinear and DequantizeLinear.
        shapes: min, opt and max shape by input.
    """
    from smelt.runtimes.ort_tensorrt_backend import format_shapes

    return {
        "trt_fp16_enable": str(dtype == "fp16"),
        "trt_bf16_enable": str(dtype == "bf16"),
        "trt_int8_enable": str(quantized),
        "trt_layer_norm_fp32_fallback": str(dtype == "fp16"),
        "trt_sparsity_enable": "True",
        "trt_builder_optimization_level": str(settings.optimization_level),
        "trt_timing_cache_enable": str(settings.timing_cache),
        "trt_engine_hw_compatible": str(settings.hardware_compatibility == "ampere+"),
        "trt_context_memory_sharing_enable": str(settings.context_memory == "shared"),
        **{
            f"trt_profile_{end}_shapes": format_shapes(
                {name: sizes[bound_index] for name, sizes in shapes.items()}
            )
            for bound_index, end in enumerate(("min", "opt", "max"))
        },
        **(
            {}
            if settings.workspace_mib is None
            else {"trt_max_workspace_size": str(settings.workspace_mib << 20)}
        ),
    }
