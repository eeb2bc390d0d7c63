"""Every setting of the stage reaches the builder's configuration, under the bindings' names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smelt.export.tensorrt.build_engine import BuildOptions, _configure

DEFAULT: dict[str, Any] = {
    "workspace_mib": 2048, "optimization_level": 3, "tf32": True, "hardware_compatibility": "none",
    "version_compatible": False, "timing_cache": None, "weights": "embedded",
}  # fmt: skip
FLAGS = (
    "TF32",
    "SPARSE_WEIGHTS",
    "WEIGHT_STREAMING",
    "VERSION_COMPATIBLE",
    "REFIT",
    "STRIP_PLAN",
    "REFIT_IDENTICAL",
)


class Config:
    """Notes what it is told, as `IBuilderConfig`."""

    def __init__(self) -> None:
        self.flags: set[str] = {"TF32"}  # on by default
        self.pools: dict[str, int] = {}
        self.builder_optimization_level: int | None = None
        self.hardware_compatibility_level: str | None = None
        self.progress_monitor: Any = None
        self.profiling_verbosity: str | None = None

    def set_flag(self, flag: str) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: str) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.pools[pool] = size


class Monitor:
    """As `IProgressMonitor`."""


def configured(progress_calls: list[Any], **change: Any) -> Config:
    config = Config()
    trt = SimpleNamespace(
        MemoryPoolType=SimpleNamespace(WORKSPACE="workspace"),
        BuilderFlag=SimpleNamespace(**{name: name for name in FLAGS}),
        HardwareCompatibilityLevel=SimpleNamespace(
            NONE="none", AMPERE_PLUS="ampere", SAME_COMPUTE_CAPABILITY="same"
        ),
        IProgressMonitor=Monitor,
        ProfilingVerbosity=SimpleNamespace(DETAILED="detailed"),
    )
    builder = SimpleNamespace(create_builder_config=lambda: config)
    options = BuildOptions(**(DEFAULT | change))
    _configure(trt, builder, options, lambda *progress: progress_calls.append(progress), Path("m.onnx").name)
    return config


@pytest.mark.parametrize(("change", "flags"), [
    ({}, {"TF32"}), ({"tf32": False}, set()), ({"version_compatible": True}, {"TF32", "VERSION_COMPATIBLE"}),
    ({"weight_streaming": True}, {"TF32", "WEIGHT_STREAMING"}),
    ({"weights": "refittable"}, {"TF32", "REFIT"}),
    ({"weights": "stripped"}, {"TF32", "STRIP_PLAN", "REFIT_IDENTICAL"}),
])  # fmt: skip
def test_builder_flags_follow_settings(change: dict[str, Any], flags: set[str]) -> None:
    assert configured([], **change).flags == flags | {"SPARSE_WEIGHTS"}


def test_optimization_level_workspace_and_compatibility_are_set() -> None:
    config = configured([], optimization_level=5, workspace_mib=64, hardware_compatibility="same-cc")
    assert (config.builder_optimization_level, config.pools) == (5, {"workspace": 64 << 20})
    assert config.profiling_verbosity == "detailed"
    assert config.hardware_compatibility_level == "same"
    assert configured([], hardware_compatibility="ampere+").hardware_compatibility_level == "ampere"
    assert configured([], workspace_mib=None).pools == {}  # TensorRT's own limit: all memory
    assert configured([]).hardware_compatibility_level is None


def test_progress_reports_outermost_phase() -> None:
    progress_calls: list[Any] = []
    monitor = configured(progress_calls).progress_monitor
    monitor.phase_start("Building", None, 2)
    monitor.phase_start("Tactics", "Building", 9)
    assert monitor.step_complete("Tactics", 3)
    assert monitor.step_complete("Building", 0)  # true: the build goes on
    monitor.phase_finish("Tactics")
    monitor.step_complete("Building", 5)
    monitor.phase_finish("Building")
    monitor.step_complete("Building", 0)
    assert progress_calls == [(1, 2, "m.onnx: Building"), (2, 2, "m.onnx: Building")]
