"""Runs of smelt whose imports are done already: a warmed process that forks one child for each.

`python fork_server.py` reads lines of JSON. To one with `arguments`, those of `smelt`, it answers with the
child's process id; to "runs" whether that child still does; to "wait" how it ended. Nothing that would
start threads runs before the forks. Tests share one such process (`shared_server`).
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

_RUN_IMPORTS = [
    *("accelerate", "sklearn.metrics", "transformers.trainer", "smelt.pipeline.execute.run",
        "smelt.pipeline.plan.load_plan"),
    *("smelt.compress.finetune", "smelt.compress.distill.stage", "smelt.compress.factorize.stage"),
    *("smelt.compress.prune.stage", "smelt.compress.prune.importances.taylor", "smelt.training.trainer"),
    *("smelt.compress.quantize.plan_layers", "smelt.evaluate.environment", "smelt.evaluate.quality"),
    *("smelt.runtimes.predict_texts", "smelt.quantization.layers", "smelt.runtimes.torch_backend"),
]  # fmt: skip


class ForkServer:
    """The parent's end: a context manager. One run at a time; `environment` is that of all runs."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._child: int | None = None

    def __enter__(self) -> Self:
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process: Any = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**self._environment, **single, "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self._process.stdout.readline() == "ready\n"
        return self

    def _ask(self, request: Any) -> Any:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def run(self, *arguments: Any, before: str = "") -> tuple[int, str]:
        """Run `smelt ARGUMENTS` to its end; return its exit code and what it printed, errors included."""
        with tempfile.NamedTemporaryFile("r") as output:
            self.start(*arguments, before=before, output=Path(output.name))
            return self.wait(), output.read()

    def start(self, *arguments: Any, before: str = "", output: Path | None = None) -> int:
        """Begin `smelt ARGUMENTS`; return its process id, which stays its own until `wait`.

        Args:
            arguments: paths and numbers may be given as they are.
            before: Python that the run's process executes first.
            output: the file to which it prints, errors included; without one, nobody reads what it prints.
        """
        command = [*map(str, arguments)]
        request = {"arguments": command, "before": before, "output": str(output or os.devnull)}
        self._child = int(self._ask(request | {"errors": output is not None}))
        return self._child

    def is_running(self) -> bool:
        """Tell whether the run that was begun last has not ended."""
        return bool(self._ask("runs"))

    def wait(self) -> int:
        """Return the exit code of the run that was begun last, or minus the signal that ended it."""
        self._child = None
        return int(self._ask("wait"))

    def kill(self) -> None:
        """Kill the run that was begun last, unless someone waited for its end."""
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stdin.close()
        self._process.wait()


@functools.cache
def shared_server() -> ForkServer:
    """Return the server of this process of the tests, which ends with it."""
    server = ForkServer().__enter__()
    atexit.register(server.__exit__, None, None, None)
    return server


def _serve() -> None:
    import torch

    from smelt.cli.main import main

    for name in _RUN_IMPORTS:
        import_module(name)
    for name in ("BertForSequenceClassification", "BertTokenizer"):
        getattr(import_module("transformers"), name)  # imported when it is asked for
    import_module("smelt.evaluate.report.render")._template()  # compiled once, as in any process
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    import_module("tests.support.blank_figures").leave_figures_blank()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is there now stays: a child's collections need not look at it, or copy its pages
    answers = os.fdopen(os.dup(1), "w")
    print("ready", file=answers, flush=True)
    child = 0
    while line := sys.stdin.readline():
        request = json.loads(line)
        if request == "runs":
            child_status = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            response: Any = child_status is None
        elif request == "wait":
            response = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            child = response = os.fork()
            if not child:
                _run(main, request)
        print(json.dumps(response), file=answers, flush=True)


def _run(main: Any, request: dict[str, Any]) -> NoReturn:
    """Be the child: one run, and the end of this process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2)[: 1 + request["errors"]]:
        os.dup2(output, descriptor)
    try:
        exec(request["before"], {})
        main(request["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 70
    else:
        code = 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
