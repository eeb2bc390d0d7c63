"""Runs of smelt whose imports are done already: a warmed process that forks one child for each.

`python fork_server.py` reads lines of JSON, the arguments of `smelt`, and answers each with the child's
process id; to a second line, which may be empty, it answers how the child ended. Nothing that would
start threads runs before the forks.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_IMPORTED_BY_A_RUN = [
    *("accelerate", "sklearn.metrics", "transformers.trainer", "smelt.execute.run", "smelt.plan.checks"),
    *("smelt.compress.finetune", "smelt.compress.distill.logits", "smelt.compress.factorize.svd"),
    *("smelt.compress.prune.structured", "smelt.compress.prune.importance", "smelt.compress.train.loop"),
    *("smelt.compress.quantize.coding", "smelt.evaluate.environment", "smelt.evaluate.quality"),
    *("smelt.evaluate.report.html", "smelt.evaluate.report.markdown", "smelt.evaluate.report.table"),
    *("smelt.runtime.predict", "smelt.runtime.layers.quantized", "smelt.runtime.backends.torch_backend"),
]


class ForkServer:
    """The parent's end: a context manager. Without `locks` the runs' file system knows none."""

    def __init__(self, locks: bool = True) -> None:
        self._locks = locks

    def __enter__(self) -> Self:
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process: Any = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *([] if self._locks else ["without-locks"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | single | {"TOKENIZERS_PARALLELISM": "false"},
        )
        assert self._process.stdout.readline() == "ready\n"
        return self

    def start(self, *arguments: str) -> int:
        """Begin `smelt ARGUMENTS`; return its process id, which stays its own until `wait`."""
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def wait(self) -> int:
        """Return the exit code of the run that was begun last, or minus the signal that ended it."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stdin.close()
        self._process.wait()


def _serve() -> None:
    import torch
    from colliding import WITHOUT_LOCKS

    from smelt.cli import main

    if sys.argv[1:] == ["without-locks"]:
        exec(WITHOUT_LOCKS, {})
    for name in _IMPORTED_BY_A_RUN:
        import_module(name)
    for name in ("BertForSequenceClassification", "BertTokenizer"):
        getattr(import_module("transformers"), name)  # imported when it is asked for
    import_module("smelt.evaluate.report.html")._template()  # compiled once, as in any process
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is there now stays: a child's collections need not look at it, or copy its pages
    answers = os.fdopen(os.dup(1), "w")
    print("ready", file=answers, flush=True)
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1):
                os.dup2(nothing, descriptor)
            try:
                main(json.loads(line))
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
            except BaseException:
                traceback.print_exc()
                os._exit(70)
            os._exit(0)
        print(child, file=answers, flush=True)
        sys.stdin.readline()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
