"""Measure latency and throughput under concurrent requests (`smelt bench --callers`).

Each caller is a thread that sends one text after another. In process, the callers share a model of
`smelt.load`; with `http` they send requests to the service of a standalone package, each over a connection of
its own. Artifacts alternate round by round, so that other work on the machine affects all of them.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import os
import queue
import re
import statistics
import subprocess
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.api.timing import open_artifacts, timing_samples
from smelt.core.artifact import Artifact, default_threads
from smelt.core.errors import InputError, RunError, SmeltError, TruncationWarning
from smelt.core.messages import error_message, messages_to_json
from smelt.core.system import child_environment, python_command
from smelt.data.splits import Example
from smelt.data.tasks import task_traits
from smelt.runtimes.onnx_import.trial_run import require_safe_artifact
from smelt.stage import Progress, no_progress
from smelt.tasks.registry import task_spec

if TYPE_CHECKING:
    from smelt.api.load import Model, TextOrPair

_WIDTH = 80
_SERVICE_FILE = "serve.py"
_START_SECONDS = 120
_REQUEST_SECONDS = 120
_PERCENTILES = (50, 95, 99)
# of each caller in a round, so that the queue is not only being filled and emptied
_LEAST_REQUESTS = 4

Call = Callable[["TextOrPair"], None]
"""Answers one text; raises a SmeltError if it cannot."""
Target = Callable[[], AbstractContextManager[Call]]
"""Opens what one caller needs."""


@dataclass(frozen=True)
class LoadSettings:
    """What is measured: numbers of callers, requests per round (at least four per caller), rounds, threads.

    http: over the service of a standalone package, else in process. texts: number of different texts.
    threads: CPU threads per call; None: the artifact's setting, else 1.
    """

    callers: tuple[int, ...]
    requests: int = 100
    rounds: int = 5
    threads: int | None = None
    http: bool = False
    texts: int = 16

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as in the JSON output."""
        return {**vars(self), "callers": list(self.callers)}


@dataclass
class LoadRounds:
    """The measured rounds of one artifact with one number of callers: times of requests, requests/s."""

    latencies_ms: list[float] = field(default_factory=list)
    throughputs: list[float] = field(default_factory=list)

    def row(self, callers: int) -> dict[str, Any]:
        """Return the row of the JSON output: percentiles of all requests, the median round's requests/s."""
        import numpy as np

        percentiles = np.percentile(self.latencies_ms, _PERCENTILES).tolist()
        return {
            "callers": callers,
            "requests": len(self.latencies_ms),
            "rounds": len(self.throughputs),
            **{f"p{n}_ms": value for n, value in zip(_PERCENTILES, percentiles, strict=True)},
            "throughput": statistics.median(self.throughputs),
            "throughput_range": [min(self.throughputs), max(self.throughputs)],
        }


def measure_load(
    folders: Sequence[Path],
    settings: LoadSettings,
    data: Path | None = None,
    columns: Sequence[str] = (),
    generation: Mapping[str, Any] | None = None,
    device: str = "auto",
    progress: Progress = no_progress,
    trust_engine: bool = False,
) -> dict[str, Any]:
    """Measure the artifacts in `folders` under concurrent requests of one text or pair of texts each.

    Args:
        folders: artifacts of one task; with `settings.http`, standalone packages, whose code is run.
        settings: see `LoadSettings`.
        data: as in `smelt.api.timing.time_artifacts`.
        columns: as in `smelt.api.timing.time_artifacts`.
        generation: settings of `GenerationSettings`; a package has its own.
        device: auto, cpu or cuda.
        progress: called after every round.
        trust_engine: as in `smelt.load`.

    Returns:
        The output of `smelt bench --callers N --json`: task, texts, settings, environment and, by artifact,
        its folder, size and rows of `load`, or error.

    Raises:
        InputError: as `time_artifacts`, or a folder is not a standalone package.
    """
    from smelt.evaluate.environment import describe_environment
    from smelt.evaluate.latency import LatencySettings
    from smelt.evaluate.latency.summary import spread_over_lengths

    artifacts = open_artifacts(folders)
    task = next(iter(artifacts.values())).manifest.task
    _require_measurable(artifacts, task, settings, generation)
    first = next(iter(artifacts.values()))
    with timing_samples(data, task, columns, first, LatencySettings()) as (examples, _), ExitStack() as stack:
        targets: dict[str, Target] = {}
        errors: dict[str, SmeltError] = {}
        for name, artifact in artifacts.items():
            require_safe_artifact(artifact, trust_engine)
            try:
                targets[name] = _open_target(
                    artifact, settings, generation or {}, device, trust_engine, stack
                )
            except SmeltError as error:
                errors[name] = error
        indices = spread_over_lengths([example.text for example in examples], settings.texts)
        sent = [_input_of(examples[index], task) for index in indices]
        rows = _measure_targets(targets, sent, settings, errors, progress)
    return {
        "task": task,
        "texts": {"from": str(data) if data else "standard", "n": len(examples)},
        "settings": settings.as_dict(),
        "environment": describe_environment(),
        "artifacts": {
            name: {
                "folder": str(artifact.path),
                "key": artifact.key,
                "format": artifact.format,
                "target": artifact.manifest.details.get("target"),
                "size_bytes": artifact.size_bytes,
                "error": _error_json(errors[name]) if name in errors else None,
                "load": rows.get(name, []),
            }
            for name, artifact in artifacts.items()
        },
    }


def _input_of(example: Example, task: str) -> TextOrPair:
    """Return the input of a request; an embedder takes the texts of a pair one by one, so the first."""
    if example.text_pair is None or task_traits(task).text_pair != "joined":
        return example.text
    return example.text, example.text_pair


def _error_json(error: SmeltError) -> dict[str, Any]:
    fields: dict[str, Any] = messages_to_json([error_message(error.code, str(error))])[0]
    return fields


def _require_measurable(
    artifacts: Mapping[str, Artifact],
    task: str,
    settings: LoadSettings,
    generation: Mapping[str, Any] | None,
) -> None:
    if task_traits(task).modality not in ("text", "image"):
        raise InputError(
            f"bench --callers sends texts or images, and the task is {task}. Remove --callers.",
            code="unsupported-task",
        )
    if settings.http and generation:
        raise InputError(
            "--max-new-tokens does not apply to a service, whose infer.json has its own setting. Remove it.",
            code="unused-setting",
        )
    for artifact in artifacts.values() if settings.http else ():
        if not (artifact.path / _SERVICE_FILE).is_file():
            raise InputError(
                f"{artifact.path}: no {_SERVICE_FILE}, so it is not a standalone package. Write one with"
                f" `smelt package {artifact.path}`, or remove --http.",
                code="not-a-package",
                file=str(artifact.path),
            )


def _open_target(
    artifact: Artifact,
    settings: LoadSettings,
    generation: Mapping[str, Any],
    device: str,
    trust_engine: bool,
    stack: ExitStack,
) -> Target:
    """Return the model or the service of an artifact, which `stack` closes."""
    if settings.http:
        sends_files = task_traits(artifact.manifest.task).modality in ("image", "audio")
        port = stack.enter_context(running_service(artifact.path, settings.threads))
        return lambda: service_caller(port, sends_files)
    from smelt.api.load import Model

    threads = settings.threads or default_threads(artifact.manifest) or 1
    model = stack.enter_context(Model(artifact.path, threads, device, trust_engine))
    return lambda: contextlib.nullcontext(_model_call(model, generation))


def _model_call(model: Model, generation: Mapping[str, Any]) -> Call:
    method = getattr(model, task_spec(model.task).method)

    def call(text: TextOrPair) -> None:
        method([text], **generation)

    return call


def _measure_targets(
    targets: Mapping[str, Target],
    texts: Sequence[TextOrPair],
    settings: LoadSettings,
    errors: dict[str, SmeltError],
    progress: Progress,
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each artifact; an artifact that fails is moved to `errors`."""
    measured = {(name, count): LoadRounds() for name in targets for count in settings.callers}
    total = len(measured) * (settings.rounds + 1)
    finished = itertools.count(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        for round_number in range(settings.rounds + 1):
            for (name, callers), rounds in measured.items():
                # the first round opens graphs and connections, and is not counted
                count = max(_LEAST_REQUESTS * callers, settings.requests) if round_number else callers
                if name not in errors:
                    try:
                        latencies_ms, seconds = send_requests(targets[name], texts, count, callers)
                    except SmeltError as error:
                        errors[name] = error
                    else:
                        if round_number:
                            rounds.latencies_ms += latencies_ms
                            rounds.throughputs.append(count / seconds)
                progress(next(finished), total, f"{name}, {callers} caller{'s' * (callers > 1)}")
    return {
        name: [measured[name, callers].row(callers) for callers in settings.callers]
        for name in targets
        if name not in errors
    }


def send_requests(
    target: Target, texts: Sequence[TextOrPair], count: int, callers: int
) -> tuple[list[float], float]:
    """Send `count` requests from `callers` threads; return the times of the requests, ms, and the total, s.

    Raises:
        SmeltError: the first that a request raised; no further requests are sent.
    """
    waiting: queue.SimpleQueue[TextOrPair] = queue.SimpleQueue()
    for text in itertools.islice(itertools.cycle(texts), count):
        waiting.put(text)
    latencies_ms: list[float] = []
    errors: list[BaseException] = []
    begins: list[float] = []
    # starting a thread takes longer than a small model's call, so all wait for the last one
    start = threading.Barrier(callers, action=lambda: begins.append(time.perf_counter()))

    def caller() -> None:
        try:
            with target() as call:
                start.wait()
                while not errors:
                    text = waiting.get_nowait()
                    begin = time.perf_counter()
                    call(text)
                    latencies_ms.append(1000 * (time.perf_counter() - begin))
        except (queue.Empty, threading.BrokenBarrierError):
            return
        except Exception as error:  # raised again below, in the caller's thread
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=caller) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = time.perf_counter()
    if errors:
        raise errors[0]
    return latencies_ms, end - begins[0]


@contextmanager
def running_service(package: Path, threads: int | None = None) -> Iterator[int]:
    """Start the service of a standalone package on a free port of this machine; yield the port.

    Options of the service can be set as environment variables, such as MAX_BATCH. Its code is that of the
    package.

    Raises:
        RunError: `service-failed`, it ended, or was not ready in time.
    """
    options = ["--host", "127.0.0.1", "--port", "0", *(["--threads", str(threads)] if threads else [])]
    command = python_command(_SERVICE_FILE, *options)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            command, cwd=package, stdout=subprocess.PIPE, stderr=log, text=True, env=child_environment()
        ) as process,
    ):
        too_late = threading.Timer(_START_SECONDS, process.kill)
        too_late.start()
        try:
            assert process.stdout is not None
            match = re.search(r":(\d+)$", process.stdout.readline())
            if match is None or process.stdout.readline() != "ready\n":
                process.kill()
                process.wait()
                log.seek(0)
                lines = log.read().splitlines() or [f"it was not ready within {_START_SECONDS} s"]
                raise RunError(
                    f"{package}: the service did not start: {lines[-1]}. Start it with `python serve.py` to"
                    " see the whole error.",
                    code="service-failed",
                    file=str(package),
                )
            too_late.cancel()
            yield int(match[1])
        finally:
            too_late.cancel()
            process.kill()


@contextmanager
def service_caller(port: int, sends_files: bool = False) -> Iterator[Call]:
    """Yield a function that sends a text, a pair, or a file, to the service on this machine.

    It raises `RunError`: `service-busy` for status 503, `service-closed` if there is no response, and
    `service-failed` for other responses than 200.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_REQUEST_SECONDS)

    def call(text: TextOrPair) -> None:
        value = base64.b64encode(Path(str(text)).read_bytes()).decode() if sends_files else text
        body = json.dumps({"inputs": [value]})
        try:
            connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RunError(
                f"The service on port {port} does not respond: {error or type(error).__name__}. Start it"
                " again.",
                code="service-closed",
            ) from error
        if response.status == http.client.SERVICE_UNAVAILABLE:
            raise RunError(
                f"The service rejected a request as it is busy: {_shown(answer)}. Use fewer callers, or raise"
                " its limits (MAX_WAITING, TIMEOUT).",
                code="service-busy",
            )
        if response.status != http.client.OK:
            raise RunError(
                f"The service answered with status {response.status}: {_shown(answer)}. Check the texts of"
                " --data.",
                code="service-failed",
            )

    with contextlib.closing(connection):
        yield call


def _shown(answer: bytes) -> str:
    return " ".join(answer.decode("utf-8", "replace").split())[:200]


def load_table(result: Mapping[str, Any]) -> str:
    """Return the measured load as text of at most 80 columns, with a block per number of callers."""
    artifacts = result["artifacts"]
    room = min(24, max(len("artifact"), *map(len, artifacts)))
    heads = f"{'artifact':{room}} {'callers':>7} {'p50 ms':>8} {'p95 ms':>8} {'p99 ms':>8} {'requests/s':>11}"
    lines = [heads, "─" * len(heads)]
    for index, callers in enumerate(result["settings"]["callers"]):
        lines += [""] if index else []
        for name, artifact in artifacts.items():
            row = next((row for row in artifact["load"] if row["callers"] == callers), None)
            keys = ("p50_ms", "p95_ms", "p99_ms", "throughput")
            cells = ["–" if row is None else f"{row[key]:,.4g}" for key in keys]
            columns = "".join(f" {c:>{w}}" for c, w in zip(cells, (8, 8, 8, 11), strict=True))
            lines.append(f"{name[:room]:{room}} {callers:>7}{columns}")
    settings, texts = result["settings"], result["texts"]
    caller_text = "over HTTP, with serve.py on this machine" if settings["http"] else "in one process"
    num_texts = min(settings["texts"], texts["n"])
    notes = [
        f"Each request is one text ({num_texts:,} of {texts['n']:,}, {texts['from']}), {caller_text}."
        f" {settings['rounds']} rounds of {settings['requests']:,} requests, or four per caller."
        f" {os.cpu_count()} cores, {result['environment']['cpu']}."
    ]
    notes += [f"{name}: {a['error']['message']}" for name, a in artifacts.items() if a["error"]]
    return "\n".join([*lines, "", *(line for note in notes for line in textwrap.wrap(note, _WIDTH))])
