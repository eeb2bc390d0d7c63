"""What every worker of peers.py has in common: it makes its files once, then answers requests on a pipe.

Needs the standard library alone: it runs in the environment of each system.

    python -m peer_systems.NAME_worker make '{"work": ..., "files": ..., ...}'
    python -m peer_systems.NAME_worker serve '{"work": ..., "files": ..., ...}'

A job names: `work` (marian, opus, bert, llama), `model` (a Hugging Face folder), `files` (a folder of this
system's own), `from` (the folder of the system that it begins with, if any), `variant`, `threads`, `workers`
(batches at the same time), and `calibration` (rows of token ids). A request is a case with its `batches`,
lists of texts or of rows of token ids; the answer says what they took, in seconds, and what came out, a text,
tokens or logits for each row.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Job = dict[str, Any]
Case = dict[str, Any]
Rows = list[Any]
Run = Callable[[Rows, Case], Rows]
"""Takes one batch, and the case's settings: `beams`, `new_tokens`, `batch`; returns a result for each row."""
Opened = tuple[Run, str]
"""What runs a batch, and the versions of what runs it."""


def run_request(run: Run, request: Case) -> dict[str, Any]:
    """Run the request's batches; return processor and wall seconds of all, and the results."""
    outputs: Rows = []
    processor, wall = time.process_time(), time.perf_counter()
    for batch in request["batches"]:
        outputs += run(batch, request)
    return {
        "cpu_s": time.process_time() - processor,
        "wall_s": time.perf_counter() - wall,
        "results": [row if isinstance(row, str) else list(row) for row in outputs],
    }


def main(make: Callable[[Job], None], serve: Callable[[Job], Opened]) -> None:
    """Make the files, or answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to standard output
    job: Job = json.loads(sys.argv[2])
    if sys.argv[1] == "make":
        make(job)
        return
    run, version = serve(job)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_request(run, json.loads(line))), file=answers, flush=True)


def nothing_to_make(job: Job) -> None:
    """For systems that run the model's own folder."""
