"""Open a graph in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime


def open_graph(path: Path, threads: int | None) -> Any:
    """Open a graph with the session options of its scores. threads: per call, None for all."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads or 0  # 3: no warnings
    cpu = Path("/proc/cpuinfo")
    words = set(cpu.read_text(errors="replace").split()) if cpu.is_file() else set()
    if "avx2" in words and not words & {"avx512_vnni", "avx_vnni", "amx_int8"}:
        options.add_session_config_entry("session.x64quantprecision", "1")  # exact int8 matmuls
    return onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )
