"""The stage `tensorrt`: build one engine per ONNX graph, for the lengths and batch sizes of the data.

For third-party graphs, ranges are by axis, independent of axis names. For inputs of texts axis 0 is the batch
and axis 1 the length. For arrays one axis is the batch; every other axis without a fixed size gets the size
of the samples in the data.

Lengths and sizes come from the data or the recipe; ONNX Runtime's options for TensorRT have them too. Source
of these: ONNX Runtime's documentation, "TensorRT Execution Provider"; its parser requires `True` and `False`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact, Format
from smelt.core.errors import InputError, RunError
from smelt.core.messages import Message
from smelt.data.tasks import GRAPH_TASKS, Task, tasks_with
from smelt.export.settings import FIXED_SIZES, ProviderSettings, TensorrtSettings
from smelt.export.tensorrt.build_engine import (
    BuildOptions,
    ProfileShapes,
    SizeRange,
    build_engine,
    profile_shapes,
    timing_cache_path,
)
from smelt.export.tensorrt.preflight import TensorrtProblem, check_profile, load_graph, preflight
from smelt.export.tensorrt.profiles import (
    imported_ranges,
    imported_shapes,
    largest_profile,
    profile_ranges,
)
from smelt.models.model_size import SizeInputs, StepSize, one_shot_size
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
