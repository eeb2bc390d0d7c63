"""HTTP service for the model in this folder: python serve.py, then POST /predict with {"inputs": [...]}.

Every option can also be set as an environment variable: --max-batch as MAX_BATCH.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from smelt.export.package.standalone.http_requests import InferenceServer
from smelt.export.package.standalone.packaged_model import Batcher, PackagedModel

MODEL_FOLDER = Path(__file__).parent


def available_cores() -> int:
    """Return the number of cores that this process may use: of the machine, and of a container's limit."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no limit, or not Linux
        return count


def int_option(least: int, most: int = 10**9) -> Any:
    """Return a parser for an integer option."""

    def number(word: str) -> int:
        if least <= int(word) <= most:
            return int(word)
        raise argparse.ArgumentTypeError(f"expected {least} or more, got {word}")

    return number


def parse_seconds(word: str) -> float:
    """Parse an option in seconds."""
    if 0 <= float(word) < float("inf"):
        return float(word)
    raise argparse.ArgumentTypeError(f"expected seconds, got {word}")


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options: of the command line, else of the environment, else the defaults."""
    config = json.loads((MODEL_FOLDER / "infer.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(prog="serve.py", description=__doc__)

    def add(name: str, default: Any, kind: Any, about: str) -> None:
        found = os.environ.get(name.upper().replace("-", "_"), str(default))
        parser.add_argument(f"--{name}", default=found, type=kind, help=f"{about} (default: {default})")

    add("host", "127.0.0.1", str, "address to listen on; 0.0.0.0: all, as in the container")
    add("port", 8000, int_option(0, 65535), "0: any free port")
    add("threads", config.get("threads") or 1, int_option(1), "threads per call of the model")
    add("workers", 0, int_option(0), "concurrent calls; 0: as many as fit the cores")
    add("max-batch", 16, int_option(1), "maximum inputs per call; 1: no batching")
    about = "1: no batch has inputs of several requests, so answers do not depend on other requests"
    add("separate-requests", 0, int_option(0, 1), about)
    add("max-wait", 0, parse_seconds, "seconds that an input waits for others, even if the model is free")
    add("max-waiting", 256, int_option(1), "maximum waiting inputs, and inputs per request; more get 503")
    add("max-body", 16 * 2**20, int_option(1), "maximum bytes of a request")
    add("max-bodies", 256 * 2**20, int_option(1), "maximum bytes of all requests in flight; more get 503")
    add("timeout", 60, parse_seconds, "seconds until a waiting input gets 503")
    add("grace", 8, parse_seconds, "seconds to finish requests in flight after SIGTERM")
    about = "check whether the running service is ready; exit with 0 or 1"
    parser.add_argument("--health", action="store_true", help=about)
    found = parser.parse_args(words)
    found.task = config["task"]
    found.workers = found.workers or max(1, available_cores() // found.threads)
    return found


def is_healthy(options: argparse.Namespace) -> bool:
    """Return whether the service with these options reports that it is ready."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    connection = http.client.HTTPConnection(host, options.port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def load_service_model(service: InferenceServer) -> None:
    """Load the model; stop the service if that fails."""
    options = service.options
    try:
        service.model = PackagedModel(MODEL_FOLDER, options.task, options.threads)
        service.batcher = Batcher(
            service.call,
            options.max_batch,
            options.max_wait,
            options.max_waiting,
            options.workers,
            bool(options.separate_requests),
        )
        print("ready", flush=True)
    except Exception:
        traceback.print_exc()
        service.failed = True
        service.shutdown()


def stop_gracefully(service: InferenceServer) -> None:
    """Wait for the requests in flight, at most `grace` seconds."""
    service.stopping = True
    service.server_close()
    end = time.monotonic() + service.options.grace
    with service.idle:
        while service.busy and (left := end - time.monotonic()) > 0:
            service.idle.wait(left)


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    options = parse_options()
    if options.health:
        return 0 if is_healthy(options) else 1
    try:
        service = InferenceServer(options)
    except OSError as error:
        print(f"error: cannot listen on {options.host}, port {options.port}: {error}", file=sys.stderr)
        return 2

    def ended(*_: Any) -> None:
        service.stopping = True
        threading.Thread(target=service.shutdown).start()  # shutdown waits for the loop, in which this runs

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ended)
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"listening on http://{host}:{service.server_port}", flush=True)
    threading.Thread(
        target=load_service_model, args=(service,), daemon=True
    ).start()  # it prints the second line
    service.serve_forever(0.1)
    stop_gracefully(service)
    return 1 if service.failed else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # not a normal exit of Python: a thread may still be inside the model
