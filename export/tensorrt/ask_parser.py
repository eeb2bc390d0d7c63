"""What the parser of the installed TensorRT says of a graph, asked in a process of its own.

A native library that fails may take its process with it, and its parser needs a builder, which the full
TensorRT makes only where there is a GPU. As a script: `python -m smelt.export.tensorrt.ask_parser FILE`
prints the errors as a JSON list.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from smelt.core.child_process import child_environment, python_command

_SECONDS = 300


class Verdict(NamedTuple):
    """asked: which TensorRT answered, None where none could. errors: what it refuses. why: why none could."""

    asked: str | None
    errors: tuple[str, ...] = ()
    why: str = ""


def ask_parser(path: Path) -> Verdict:
    """Let the installed TensorRT parse `path`; say why it could not be asked where it could not."""
    from smelt.runtime.backends.tensorrt_module import find_tensorrt

    name = find_tensorrt()
    if name is None:
        return Verdict(None, why="TensorRT is not installed (pip install tensorrt).")
    command = python_command("-m", __name__, str(path))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=child_environment()
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Verdict(None, why=f"its process failed: {error}")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        return Verdict(None, why=f"{name} ended with code {done.returncode}. It said: {said[:200]}")
    answer = json.loads(lines[-1])
    return Verdict(answer["asked"], tuple(answer["errors"]), answer["why"])


def _answer(path: Path) -> Verdict:
    """Parse `path` in this process."""
    from smelt.core.errors import SmeltError
    from smelt.export.tensorrt.build import make_builder, parse
    from smelt.runtime.backends.tensorrt_module import import_tensorrt, make_logger

    try:
        trt = import_tensorrt()
        logger = make_logger(trt)
        builder = make_builder(trt, logger, path.name)
    except SmeltError as error:
        return Verdict(None, why=f"no builder can be made here. {error}")
    asked = f"{trt.__name__} {trt.__version__}"
    try:
        parse(trt, builder.create_network(0), logger, path)
    except SmeltError as error:
        return Verdict(asked, tuple(str(error).splitlines()))
    return Verdict(asked)


if __name__ == "__main__":
    print(json.dumps(_answer(Path(sys.argv[1]))._asdict()))
