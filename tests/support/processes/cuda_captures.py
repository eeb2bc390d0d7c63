"""Calls of graphs with fixed shapes on ONNX Runtime's CUDA provider over stub libraries; see `main`."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.processes.cuda_rig import copied_bytes, graph_counts

CALLS = 3


def main(requests: dict[str, Any]) -> dict[str, Any]:
    """Open an artifact as a user does; call its graph CALLS times, each time from another thread.

    The provider refuses at opening a graph with nodes that it does not run.

    Args:
        requests: `artifact`, its folder; `opens_only`: do not call it.

    Returns:
        `captures`, `launches`: of CUDA graphs. `inputs`, `outputs`: bytes of a call. `copies`: bytes that
        the last call copied.
    """
    from smelt.core.artifact import read_artifact
    from smelt.runtimes.registry import open_runner

    runner = open_runner(read_artifact(Path(requests["artifact"])), 1, "cuda")
    if requests["opens_only"]:
        return graph_counts()
    backend: Any = runner.backend
    shapes = backend.input_shapes("model")
    kinds = {name: np.float32 if len(shape) == 4 else np.int64 for name, shape in shapes.items()}
    feeds = {name: np.ones(shape, kinds[name]) for name, shape in shapes.items()}
    results: list[dict[str, Any]] = []
    for _ in range(CALLS):
        copied_bytes()
        thread = threading.Thread(target=lambda: results.append(backend.call("model", feeds)))
        thread.start()
        thread.join()
    return graph_counts() | {
        "inputs": sum(values.nbytes for values in feeds.values()),
        "outputs": sum(values.nbytes for values in results[-1].values()),
        "copies": copied_bytes(),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
