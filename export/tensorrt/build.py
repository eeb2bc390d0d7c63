"""Building one TensorRT engine from one ONNX file, with every failure explained.

API: TensorRT 11 (https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api). Networks are
strongly typed, so nothing here sets a precision: it lives in the ONNX file.
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
from smelt.export.tensorrt.messages import ParserError, explain, explain_log, explain_warning
from smelt.export.tensorrt.profile import VALUES, Shapes
from smelt.runtime.backends.tensorrt_module import make_logger

# Said of every model, of a timing cache that only costs time, or followed by a line that says more.
_NOISE = ("has Int64 binding", "timing cache", "Detected layernorm nodes in FP16.")
Weights = Literal["embedded", "refittable", "stripped"]
Compatibility = Literal["none", "ampere+", "same-cc"]
_LEVELS: dict[Compatibility, str] = {
    "none": "NONE",
    "ampere+": "AMPERE_PLUS",
    "same-cc": "SAME_COMPUTE_CAPABILITY",
}
_WEIGHTS: dict[Weights, tuple[str, ...]] = {
    "embedded": (),
    "refittable": ("REFIT",),
    "stripped": ("STRIP_PLAN", "REFIT_IDENTICAL"),  # they come back unchanged, from the same graph
}


@dataclass(frozen=True)
class BuildOptions:
    """What the builder is told; see the stage's settings for what each means."""

    workspace_mib: int
    optimization_level: int
    tf32: bool
    hardware_compatibility: Compatibility
    version_compatible: bool
    timing_cache: Path | None
    weights: Weights = "embedded"


def build_engine(
    trt: Any, path: Path, profiles: Sequence[Shapes], options: BuildOptions, progress: Progress
) -> tuple[bytes, list[Message]]:
    """Return the serialized engine for the ONNX file `path`, and TensorRT's warnings.

    profiles: the shapes of each optimization profile; an empty one is none, of a graph without dynamic sizes.

    Raises:
        RunError: no builder can be made (no GPU), the parser refuses the file, or the build fails.
    """
    logger = make_logger(trt)
    builder = make_builder(trt, logger, path.name)
    network = builder.create_network(0)
    parse(trt, network, logger, path)
    config = _configure(trt, builder, options, progress, path.name)
    for shapes in (shapes for shapes in profiles if shapes):
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in shapes.items():
            set_range = profile.set_shape_input if name in VALUES else profile.set_shape
            set_range(name, least, usual, most)
        config.add_optimization_profile(profile)
    cache = _attach_timing_cache(config, options.timing_cache)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _refused([explain_log(logger.errors, path.name)])
    if cache is not None and options.timing_cache is not None:
        _write_cache(options.timing_cache, bytes(config.get_timing_cache().serialize()))
    told = [line for line in dict.fromkeys(logger.warnings) if not any(part in line for part in _NOISE)]
    return bytes(plan), [explain_warning(line) for line in told]


def make_builder(trt: Any, logger: Any, graph: str) -> Any:
    """Return a builder.

    Raises:
        RunError: none can be made: there is no GPU, or its driver is too old.
    """
    try:
        return trt.Builder(logger)
    except Exception as error:  # pybind turns a null builder into different kinds of errors
        raise _refused([explain_log([*logger.errors, str(error)], graph)]) from error


def parse(trt: Any, network: Any, logger: Any, path: Path) -> None:
    """Read the ONNX file `path` into `network`.

    Raises:
        RunError: TensorRT's parser refuses it; all that it said, a line an error.
    """
    parser = trt.OnnxParser(network, logger)
    # parse_from_file, so that external weights are found beside the file
    if parser.parse_from_file(str(path)):
        return
    errors = [_read(parser.get_error(i)) for i in range(parser.num_errors)]
    if not errors:
        raise _refused([explain_log(logger.errors, path.name)])
    raise _refused([*dict.fromkeys(explain(error, path.name) for error in errors)])


def _refused(found: Sequence[Message]) -> RunError:
    """Return the error of what TensorRT said of a graph; its code is that of all, if they have one."""
    kinds = {one.code for one in found}
    code = kinds.pop() if len(kinds) == 1 else "several-mistakes"
    return RunError("\n".join(map(str, found)), code=code, file=found[0].file, found=found)


def _read(error: Any) -> ParserError:
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
        level = _LEVELS[options.hardware_compatibility]
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    for name in _WEIGHTS[options.weights]:
        config.set_flag(getattr(trt.BuilderFlag, name))
    config.progress_monitor = _monitor(trt, progress, note)
    return config


def _monitor(trt: Any, progress: Progress, note: str) -> Any:
    """Return a progress monitor that reports the outermost phase of the build."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)  # the bindings demand it by name
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
    """Return where the timings of kernels are kept between builds, by TensorRT version and machine."""
    from smelt.core.files import hash_of

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / f"tensorrt-{trt.__name__}-{trt.__version__}-{hash_of(machine)[:12]}.cache"


def _attach_timing_cache(config: Any, path: Path | None) -> Any:
    if path is None:
        return None
    try:
        kept = path.read_bytes()
    except OSError:
        kept = b""
    cache = config.create_timing_cache(kept)
    if not config.set_timing_cache(cache, ignore_mismatch=False):
        # the kept one is of another device or version, or damaged
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _write_cache(path: Path, data: bytes) -> None:
    """Keep the timings; a full or read-only disk costs only the next build's time."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
