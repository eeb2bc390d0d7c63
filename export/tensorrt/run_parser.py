"""Parse a graph with the installed TensorRT, in a subprocess.

A native library that crashes may take its process with it, and the parser needs a builder, which the full
TensorRT creates only if there is a GPU. As a script: `python -m smelt.export.tensorrt.run_parser FILE`
prints the errors as a JSON list.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from smelt.core.system import child_environment, python_command

_TIMEOUT_SECONDS = 300


class ParserResult(NamedTuple):
    """asked: the TensorRT version, None if none could run. errors: of the parser. why: why none could run."""

    asked: str | None
    errors: tuple[str, ...] = ()
    why: str = ""


def run_parser(path: Path) -> ParserResult:
    """Parse `path` with the installed TensorRT; if it cannot run, return the reason."""
    from smelt.runtimes.tensorrt_module import find_tensorrt

    name = find_tensorrt()
    if name is None:
        return ParserResult(None, why="TensorRT is not installed (pip install tensorrt).")
    command = python_command("-m", __name__, str(path))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            env=child_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return ParserResult(None, why=f"its process failed: {error}")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        output = (done.stderr.strip() or "nothing").splitlines()[-1]
        return ParserResult(
            None, why=f"{name} exited with code {done.returncode}. Its output: {output[:200]}"
        )
    answer = json.loads(lines[-1])
    return ParserResult(answer["asked"], tuple(answer["errors"]), answer["why"])


def _parse_here(path: Path) -> ParserResult:
    """Parse `path` in this process."""
    from smelt.core.errors import SmeltError
    from smelt.export.tensorrt.build_engine import make_builder, parse_onnx
    from smelt.runtimes.tensorrt_module import import_tensorrt, make_logger

    try:
        trt = import_tensorrt()
        logger = make_logger(trt)
        builder = make_builder(trt, logger, path.name)
    except SmeltError as error:
        return ParserResult(None, why=f"no builder can be created here. {error}")
    asked = f"{trt.__name__} {trt.__version__}"
    try:
        parse_onnx(trt, builder.create_network(0), logger, path)
    except SmeltError as error:
        return ParserResult(asked, tuple(str(error).splitlines()))
    return ParserResult(asked)


if __name__ == "__main__":
    print(json.dumps(_parse_here(Path(sys.argv[1]))._asdict()))
