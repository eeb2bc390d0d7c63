"""The stage `tensorrt`: build one engine per ONNX graph, for the lengths of the data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact, Format
from smelt.core.errors import InputError, RunError
from smelt.core.messages import Message
from smelt.core.stage import Context, Need, Settings
from smelt.data.splits import ALL_TASKS, Task
from smelt.export.settings import TensorrtSettings
from smelt.export.tensorrt.build_engine import (
    BuildOptions,
    ProfileShapes,
    SizeRange,
    build_engine,
    profile_shapes,
    timing_cache_path,
)
from smelt.export.tensorrt.preflight import TensorrtProblem, check_profile, load_graph, preflight
from smelt.export.tensorrt.profile_ranges import (
    largest_profile,
    profile_ranges,
    third_party_ranges,
    third_party_shapes,
)
from smelt.models.costs import CostInputs, StepCost, one_shot_cost
from smelt.runtimes.tensorrt_engine import (
    EngineSidecar,
    current_gpu,
    external_data_files,
    graph_hash,
    import_tensorrt,
    record_built_engine,
    write_sidecar,
)


class TensorrtStage:
    """Build a TensorRT engine for each ONNX graph.

    The input is an export with `onnx: {target: tensorrt}`, or a third-party ONNX
    model that a recipe starts from. Its dtype and quantization are also the
    engine's, because TensorRT 11 has no precision settings. The file is checked
    first, because TensorRT silently builds some wrong graphs. Sizes come from the
    data: batch 1 to `max_batch_size`, lengths 1 to the 99th percentile, fastest
    at the median. An engine runs on the kind of GPU that built it, unless
    `hardware_compatibility` is set. `NAME.plan.json` next to each engine records
    how it was built.

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
    version: ClassVar[int] = 5
    settings_type: ClassVar[type[Settings]] = TensorrtSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(ALL_TASKS)

    @classmethod
    def estimate_cost(cls, settings: TensorrtSettings, inputs: CostInputs) -> StepCost:
        """Return the estimated cost of the step: the graph and the engine; the time is unknown."""
        return replace(one_shot_cost(inputs, more_bytes=inputs.source.stored_bytes), work=None)

    def __call__(self, src: Artifact, settings: TensorrtSettings, ctx: Context) -> None:
        """Write `NAME.plan` for every `NAME.onnx` of `src`, with config and tokenizer.

        Raises:
            InputError: the ONNX file was exported for another target, or no lengths are known.
            MissingDependencyError: TensorRT is not installed.
            RunError: the preflight found an error, or TensorRT rejected the graph (with node and hint).
        """
        target, foreign = (src.manifest.details.get(word) for word in ("target", "foreign"))
        if target != "tensorrt" and not foreign:
            raise InputError(
                f"{src.path}: this ONNX model was exported for '{target}', but tensorrt needs target"
                " tensorrt. Put `- onnx: {target: tensorrt}` before this step, with `from:` set to the"
                " step to export.",
                code="unsupported-target",
            )
        trt = import_tensorrt()
        profiles, limit = (third_party_ranges if foreign else profile_ranges)(src.path, settings, ctx)
        graphs = plan_graphs(
            src.path, profiles, limit, ctx.warnings, third_party_shapes if foreign else profile_shapes
        )
        options = _build_options(trt, settings)
        for path, shapes in graphs.items():
            plan, warnings = build_engine(trt, path, shapes, options, ctx.progress)
            target_path = ctx.out / f"{path.stem}.plan"
            target_path.write_bytes(plan)
            write_sidecar(target_path, _engine_sidecar(trt, path, plan, shapes, options))
            record_built_engine(target_path)
            for warning in warnings[:5]:
                ctx.warn(warning.code, f"TensorRT: {warning.message[:300]}", file=path.name)
            if options.weights == "stripped":
                copy_graph(path, ctx.out)
        _copy_other_files(src.path, ctx.out)
        kept = ("parameters", "dtype", "scheme", "foreign")
        ctx.details.update({k: src.manifest.details[k] for k in kept if k in src.manifest.details})
        ctx.details.update(
            target="tensorrt",
            tensorrt=f"{trt.__name__} {trt.__version__}",
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
        unfit = [problem for shapes in graphs[path] for problem in check_profile(model, shapes, limit)]
        problems += [problem._replace(graph=path.name) for problem in dict.fromkeys(unfit)]
    if not graphs:
        raise RunError(
            f"{folder}: no .onnx file in this folder. Put an onnx step before tensorrt.",
            code="missing-graph",
            file=str(folder),
        )
    found = [problem.as_message() for problem in problems]
    warnings.extend(problem for problem in found if problem.severity == "warning")
    errors = [problem for problem in found if problem.severity == "error"]
    if errors:
        shown = [*map(str, errors[:20])] + [f"... and {len(errors) - 20} more"] * (len(errors) > 20)
        raise RunError(
            "TensorRT does not support this graph:\n  " + "\n  ".join(shown),
            code="unsupported-graph",
            found=errors,
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
        flags={"tf32": options.tf32, "optimization_level": options.optimization_level},
        profiles=[
            {name: [list(sizes) for sizes in of] for name, of in shapes.items()} for shapes in profiles
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
    """Copy config, generation config and tokenizer: all files that are not a graph or its weights."""
    from smelt.models.checkpoint import copy_tokenizer

    for name in ("config.json", "generation_config.json"):
        if (src / name).is_file():
            shutil.copyfile(src / name, out / name)
    copy_tokenizer(src, out)
