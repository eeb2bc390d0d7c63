"""Open a graph in ONNX Runtime, and parse the command line of infer.py."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime

from smelt.export.package.standalone.fixed_graph import FixedGraph


def open_graph(path: Path, threads: int | None, memory_pattern: bool = True, pad: int = 0) -> Any:
    """Open a graph with the session options of its scores.

    threads: per call, None for all. pad: the token of padding, for a graph with fixed shapes.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads or 0  # 3: no warnings
    options.enable_mem_pattern = memory_pattern
    cpu = Path("/proc/cpuinfo")
    cpu_flags = set(cpu.read_text(errors="replace").split()) if cpu.is_file() else set()
    if "avx2" in cpu_flags and not cpu_flags & {"avx512_vnni", "avx_vnni", "amx_int8"}:
        options.add_session_config_entry("session.x64quantprecision", "1")  # exact int8 matmuls
    session: Any = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )
    shape = [size if isinstance(size, int) else None for size in session.get_inputs()[0].shape]
    length = shape[1] if len(shape) == 2 else None
    return session if shape[0] is None and length is None else FixedGraph(session, shape[0], length, pad)


def run_command_line(
    make: Callable[[], Any], answer: Callable[[Any, list[str]], list[str]], about: Any
) -> None:
    """Print an answer for each argument, or else for each line of standard input."""
    parser = argparse.ArgumentParser(prog="infer.py", description=about)
    parser.add_argument("text", nargs="*", help="if omitted, each line of standard input is a text")
    stream = sys.stdin and io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig", "surrogateescape")
    texts = parser.parse_args().text or [line.removesuffix("\n") for line in stream or ()]
    if wrong := next((text for text in texts if text != text.encode(errors="replace").decode()), None):
        parser.error(f"a text is not valid UTF-8: {wrong!r}")
    model = make()
    try:
        answers = answer(model, texts) if texts else []
    except (FloatingPointError, ValueError) as error:  # a ValueError: a file that is not an image
        parser.exit(1 + isinstance(error, ValueError), f"error: {error}\n")
    sys.stdout.buffer.write("".join(f"{answer_line}\n" for answer_line in answers).encode())
    if num_truncated := model.cut if hasattr(model, "cut") else model.tokenizer.cut:
        print(f"warning: texts longer than the model takes, which were cut: {num_truncated}", file=sys.stderr)
