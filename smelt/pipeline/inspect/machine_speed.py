"""The speeds of this machine, which turn the operations of a step into seconds.

Measured in a process of its own, because it imports torch: the blocks of a transformer at several widths
(forward, with gradients, one token), matrix products, decompositions, element-wise operations, the calls of
torch, and a file in the folder of the store. The result is kept in ~/.cache/smelt/speeds for a day.

With one thread the processor's time is taken, which other work on the machine hardly changes; with several,
the shortest of several times by the clock.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import RunError
from smelt.core.files import json_hash, load_json, seconds_since_written, write_json
from smelt.core.system import child_environment, python_command
from smelt.evaluate.environment import machine_id, physical_cores
from smelt.models.costs import Work

_KEPT_SECONDS = 24 * 3600.0
_TIMEOUT_SECONDS = 300.0
_VERSION = 1  # of the measurement
WIDTHS = (128, 256, 1024)
_FILE_BYTES = 32 * 2**20
# transformers, accelerate and their modules, which a step imports besides torch; of Python, on every machine.
_MODULE_BYTES = 330e6


@dataclass(frozen=True)
class MachineSpeed:
    """What this machine does in a second, and the memory of an interpreter.

    forward, training, decode: operations of a block a second, by the width of the model. matrix, solver:
    operations a second. moved, read, written: bytes a second. calls: torch operations a second.
    base_bytes: memory of a process that has imported what a step imports.
    """

    forward: Mapping[str, float]
    training: Mapping[str, float]
    decode: Mapping[str, float]
    matrix: float
    solver: float
    moved: float
    read: float
    written: float
    calls: float
    base_bytes: int

    def seconds(self, work: Work) -> float:
        """Return the seconds of `work`."""
        return sum(amount / self._per_second(unit, width) for (unit, width), amount in work.amounts.items())

    def _per_second(self, unit: str, width: int) -> float:
        if unit == "seconds":
            return 1.0
        value: Mapping[str, float] | float = getattr(self, unit)
        return _interpolated(value, width) if isinstance(value, Mapping) else float(value)


def _interpolated(by_width: Mapping[str, float], width: int) -> float:
    """Return the speed at a width between the measured ones, on a logarithmic scale; beyond, the nearest."""
    known = sorted((int(name), speed) for name, speed in by_width.items())
    for (low, slow), (high, fast) in itertools.pairwise(known):
        if low <= width <= high:
            part = math.log(width / low) / math.log(high / low)
            return float(slow ** (1 - part) * fast**part)
    return known[0][1] if width < known[0][0] else known[-1][1]


def machine_speed(threads: int | None, folder: Path, again: bool = False) -> MachineSpeed:
    """Return the speeds of this machine with a number of threads; measured if the kept ones are too old.

    Args:
        threads: of torch; None: all physical cores.
        folder: an existing folder on the disk of the store.
        again: whether to measure in any case.

    Raises:
        RunError: the measurement failed (`speed-not-measured`).
    """
    count = threads or physical_cores()
    names = {"machine": machine_id(), "threads": count, "version": _VERSION, "disk": folder.stat().st_dev}
    file = _cache_folder() / "smelt" / "speeds" / f"{json_hash(names)[:32]}.json"
    if not again and seconds_since_written(file) < _KEPT_SECONDS:
        try:
            return MachineSpeed(**load_json(file))
        except (OSError, ValueError, TypeError):
            pass  # damaged: measured again
    found = _measure_in_process(count, folder)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(found))
    except OSError:
        pass  # a home that cannot be written to: measured every time
    return found


def _cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir())


def _measure_in_process(threads: int, folder: Path) -> MachineSpeed:
    command = python_command("-m", "smelt.pipeline.inspect.machine_speed", str(threads), str(folder))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False,
            env=child_environment(OMP_NUM_THREADS=str(threads)),
        )  # fmt: skip
        return MachineSpeed(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError) as error:
        raise RunError(
            f"The speed of this machine could not be measured: {type(error).__name__}: {error}. Check torch"
            " with `smelt doctor`.",
            code="speed-not-measured",
        ) from error


def measure_speed(threads: int, folder: Path) -> MachineSpeed:
    """Return the speeds of this machine, measured in this process, which should not do anything else."""
    import psutil
    import torch

    base = round(psutil.Process().memory_info().rss + _MODULE_BYTES)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = time.thread_time if threads == 1 else time.perf_counter
    blocks = {width: _block_speeds(width, clock) for width in WIDTHS}
    names = ("forward", "training", "decode")
    by_width = {name: {str(w): found[i] for w, found in blocks.items()} for i, name in enumerate(names)}
    left, right = torch.randn(768, 768), torch.randn(768, 768)
    positive = left @ left.T + 768 * torch.eye(768)
    numbers, other, few = torch.randn(2**23), torch.empty(2**23), torch.ones(4)

    def solve() -> None:
        torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(positive)))

    def call() -> None:
        for _ in range(1000):
            few.add_(1.0)

    written, read = _disk_speeds(folder)
    return MachineSpeed(
        **by_width,
        matrix=2 * 768**3 / _shortest(lambda: left @ right, clock),
        solver=2 * 768**3 / _shortest(solve, clock),
        moved=2 * numbers.nbytes / _shortest(lambda: other.copy_(numbers), clock),
        read=read,
        written=written,
        calls=1000 / _shortest(call, clock),
        base_bytes=base,
    )


def _shortest(work: Callable[[], Any], clock: Callable[[], float], times: int = 3) -> float:
    """Return the shortest time of `work`, after one that is not measured."""
    work()
    found = math.inf
    for _ in range(times):
        began = clock()
        work()
        found = min(found, clock() - began)
    return max(found, 1e-9)


def _block_speeds(width: int, clock: Callable[[], float]) -> tuple[float, float, float]:
    """Return the operations a second of a block: in a pass, with gradients, and for one token of 8 texts."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    heads, tokens = max(1, width // 64), 24
    norms = [nn.LayerNorm(width) for _ in range(2)]
    query, key, value, out = (nn.Linear(width, width) for _ in range(4))
    up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    parameters = [p for m in (*norms, query, key, value, out, up, down) for p in m.parameters()]

    def block(x: Any) -> Any:
        inputs = norms[0](x)
        parts = (layer(inputs).unflatten(-1, (heads, -1)).transpose(1, 2) for layer in (query, key, value))
        x = x + F.dropout(out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2)), 0.1)
        return x + F.dropout(down(F.relu(up(norms[1](x)))), 0.1)

    def train(x: Any) -> None:
        for parameter in parameters:
            parameter.grad = None
        block(x).sum().backward()

    many, few = torch.randn(16, tokens, width, requires_grad=True), torch.randn(8, 1, width)
    each = 16 * tokens * (24 * width**2 + 4 * tokens * width)
    training = 3 * each / _shortest(lambda: train(many), clock, 2)
    with torch.no_grad():
        forward = each / _shortest(lambda: block(many), clock)
        decode = 8 * (24 * width**2 + 4 * width) / _shortest(lambda: block(few), clock, 20)
    return forward, training, decode


def _disk_speeds(folder: Path) -> tuple[float, float]:
    """Return the bytes a second that are written to a file in `folder` and flushed, and read again.

    Where nothing can be written to it, the folder of temporary files is measured.
    """
    name = f".speed-{os.getpid()}"
    try:
        trials = [_disk_trial(folder / name) for _ in range(2)]
    except OSError:
        trials = [_disk_trial(Path(tempfile.gettempdir()) / name) for _ in range(2)]
    written, read = (min(times) for times in zip(*trials, strict=True))
    return _FILE_BYTES / max(written, 1e-9), _FILE_BYTES / max(read, 1e-9)


def _disk_trial(file: Path) -> tuple[float, float]:
    """Return the seconds of writing and reading `file`, which is removed."""
    content = os.urandom(2**20) * (_FILE_BYTES // 2**20)
    try:
        with file.open("wb") as stream:
            began = time.perf_counter()
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            written = time.perf_counter() - began
            if hasattr(os, "posix_fadvise"):  # so that it is not read from memory
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        file.read_bytes()
        return written, time.perf_counter() - began
    finally:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    print(json.dumps(asdict(measure_speed(int(sys.argv[1]), Path(sys.argv[2])))))
