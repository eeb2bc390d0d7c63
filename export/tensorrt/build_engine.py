"""Build one TensorRT engine from one ONNX file, and explain every failure.

API: TensorRT 11 (https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api). Networks are
strongly typed, so no precision is set here: the ONNX file defines it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from smelt.core.errors import RunError
from smelt.core.messages import Message
from smelt.core.stage import Progress
from smelt.export.tensorrt.explain_messages import (
    ParserError,
    explain_log,
    explain_parser_error,
    explain_warning,
)
from smelt.export.tensorrt.optimization_profile import VALUE_INPUTS, ProfileShapes
from smelt.runtime.backends.tensorrt_module import make_logger

# Logged for every model, about a timing cache that only costs time, or followed by a more exact line.
_IGNORED_WARNINGS = ("has Int64 binding", "timing cache", "Detected layernorm nodes in FP16.")
WeightStorage = Literal["embedded", "refittable", "stripped"]
HardwareCompatibility = Literal["none", "ampere+", "same-cc"]
_COMPATIBILITY_LEVELS: dict[HardwareCompatibility, str] = {
    "none": "NONE",
    "ampere+": "AMPERE_PLUS",
    "same-cc": "SAME_COMPUTE_CAPABILITY",
}
_WEIGHT_FLAGS: dict[WeightStorage, tuple[str, ...]] = {
    "embedded": (),
    "refittable": ("REFIT",),
    "stripped": ("STRIP_PLAN", "REFIT_IDENTICAL"),  # they are read back unchanged from the same graph
}


@dataclass(frozen=True)
class BuildOptions:
    """Options of the TensorRT builder; the stage's settings describe them."""

    workspace_mib: int
    optimization_level: int
    tf32: bool
    hardware_compatibility: HardwareCompatibility
    version_compatible: bool
    timing_cache: Path | None
    weights: WeightStorage = "embedded"


def build_engine(
    trt: Any, path: Path, profiles: Sequence[ProfileShapes], options: BuildOptions, progress: Progress
) -> tuple[bytes, list[Message]]:
    """Return the serialized engine for the ONNX file `path`, and TensorRT's warnings.

    profiles: the shapes of each optimization profile; empty for a graph without dynamic sizes.

    Raises:
        RunError: no builder can be created (no GPU), the parser rejects the file, or the build fails.
    """
    logger = make_logger(trt)
    builder = make_builder(trt, logger, path.name)
    network = builder.create_network(0)
    parse_onnx(trt, network, logger, path)
    config = _configure(trt, builder, options, progress, path.name)
    for shapes in (shapes for shapes in profiles if shapes):
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in shapes.items():
            set_range = profile.set_shape_input if name in VALUE_INPUTS else profile.set_shape
            set_range(name, least, usual, most)
        config.add_optimization_profile(profile)
    cache = _attach_timing_cache(config, options.timing_cache)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _rejected_error([explain_log(logger.errors, path.name)])
    if cache is not None and options.timing_cache is not None:
        _write_timing_cache(options.timing_cache, bytes(config.get_timing_cache().serialize()))
    told = [
        line for line in dict.fromkeys(logger.warnings) if not any(part in line for part in _IGNORED_WARNINGS)
    ]
    return bytes(plan), [explain_warning(line) for line in told]


def make_builder(trt: Any, logger: Any, graph: str) -> Any:
    """Return a TensorRT builder.

    Raises:
        RunError: none can be created, because there is no GPU or its driver is too old.
    """
    try:
        return trt.Builder(logger)
    except Exception as error:  # pybind turns a null builder into different classes of errors
        raise _rejected_error([explain_log([*logger.errors, str(error)], graph)]) from error


def parse_onnx(trt: Any, network: Any, logger: Any, path: Path) -> None:
    """Parse the ONNX file `path` into `network`.

    Raises:
        RunError: TensorRT's parser rejects it; the message has one line per parser error.
    """
    parser = trt.OnnxParser(network, logger)
    # parse_from_file finds external weights next to the file
    if parser.parse_from_file(str(path)):
        return
    errors = [_read_parser_error(parser.get_error(i)) for i in range(parser.num_errors)]
    if not errors:
        raise _rejected_error([explain_log(logger.errors, path.name)])
    raise _rejected_error([*dict.fromkeys(explain_parser_error(error, path.name) for error in errors)])


def _rejected_error(found: Sequence[Message]) -> RunError:
    """Return the error for TensorRT's messages about a graph; its code is theirs if all have the same."""
    kinds = {one.code for one in found}
    code = kinds.pop() if len(kinds) == 1 else "several-mistakes"
    return RunError("\n".join(map(str, found)), code=code, file=found[0].file, found=found)


def _read_parser_error(error: Any) -> ParserError:
    code = error.code()
    return ParserError(
        getattr(code, "name", str(code)),
        error.desc() or "",
        error.node_name() or "",
        error.node_operator() or "",
    )


def _configure(trt: Any, builder: Any, options: BuildOptions, progress: Progress, note: str) -> Any:
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    config.builder_optimization_level = options.optimization_level
    flag = config.set_flag if options.tf32 else config.clear_flag
    flag(trt.BuilderFlag.TF32)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if options.hardware_compatibility != "none":
        level = _COMPATIBILITY_LEVELS[options.hardware_compatibility]
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    for name in _WEIGHT_FLAGS[options.weights]:
        config.set_flag(getattr(trt.BuilderFlag, name))
    config.progress_monitor = _progress_monitor(trt, progress, note)
    return config


def _progress_monitor(trt: Any, progress: Progress, note: str) -> Any:
    """Return a progress monitor that reports the outermost phase of the build."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)  # the bindings need this explicit call
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.steps:
                progress(
                    min(step + 1, self.steps[phase_name]), self.steps[phase_name], f"{note}: {phase_name}"
                )
            return True  # False would cancel the build

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

    return Monitor()


def timing_cache_path(trt: Any, machine: str) -> Path:
    """Return the path of the timing cache, one per TensorRT version and machine."""
    from smelt.core.files import json_hash

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / f"tensorrt-{trt.__name__}-{trt.__version__}-{json_hash(machine)[:12]}.cache"


def _attach_timing_cache(config: Any, path: Path | None) -> Any:
    if path is None:
        return None
    try:
        kept = path.read_bytes()
    except OSError:
        kept = b""
    cache = config.create_timing_cache(kept)
    if not config.set_timing_cache(cache, ignore_mismatch=False):
        # the stored cache is of another device or version, or damaged
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _write_timing_cache(path: Path, data: bytes) -> None:
    """Store the timings; if the disk is full or read-only, only the next build takes longer."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
