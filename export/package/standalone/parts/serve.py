"""The model of this folder as a service: python serve.py, and then POST /predict with {"inputs": [...]}.

Every option may be given in the environment too, as --max-batch in MAX_BATCH.
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

from smelt.export.package.standalone.parts.batcher import Batcher
from smelt.export.package.standalone.parts.http_requests import Service
from smelt.export.package.standalone.parts.packaged_model import PackagedModel

FOLDER = Path(__file__).parent


def cores() -> int:
    """Return how many cores this process may use: those of the machine, and of a container's limit."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no limit, or no Linux
        return count


def at_least(least: int, most: int = 10**9) -> Any:
    """Return what reads a whole number of an option."""

    def number(word: str) -> int:
        if least <= int(word) <= most:
            return int(word)
        raise argparse.ArgumentTypeError(f"expected {least} or more, read {word}")

    return number


def seconds(word: str) -> float:
    """Read an option."""
    if 0 <= float(word) < float("inf"):
        return float(word)
    raise argparse.ArgumentTypeError(f"expected seconds, read {word}")


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, over those of the environment, over the defaults."""
    said = json.loads((FOLDER / "infer.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(prog="serve.py", description=__doc__)

    def add(name: str, default: Any, kind: Any, about: str) -> None:
        found = os.environ.get(name.upper().replace("-", "_"), str(default))
        parser.add_argument(f"--{name}", default=found, type=kind, help=f"{about} (default: {default})")

    add("host", "127.0.0.1", str, "address to listen on; 0.0.0.0: all, as in the container")
    add("port", 8000, at_least(0, 65535), "0: any that is free")
    add("threads", said.get("threads") or 1, at_least(1), "threads of a call of the model")
    add("workers", 0, at_least(0), "calls at the same time; 0: as many as the cores have room for")
    add("max-batch", 16, at_least(1), "inputs in a call; 1: an input is always called alone")
    add("max-wait", 0, seconds, "seconds that an input waits for others, also where the model is free")
    add("max-waiting", 256, at_least(1), "inputs that may wait, and of a request; more get 503")
    add("max-body", 16 * 2**20, at_least(1), "bytes of a request")
    add("max-bodies", 256 * 2**20, at_least(1), "bytes of all requests on their way; more get 503")
    add("timeout", 60, seconds, "seconds until an input that waits gets 503")
    add("grace", 8, seconds, "seconds for requests on their way after SIGTERM")
    about = "ask the service that runs there whether it is ready, and end with 0 or 1"
    parser.add_argument("--health", action="store_true", help=about)
    found = parser.parse_args(words)
    found.task = said["task"]
    found.workers = found.workers or max(1, cores() // found.threads)
    return found


def healthy(options: argparse.Namespace) -> bool:
    """Say whether the service that runs with these options answers that it is ready."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    connection = http.client.HTTPConnection(host, options.port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def load(service: Service) -> None:
    """Load the model, and end the service where that fails."""
    options = service.options
    try:
        service.model = PackagedModel(FOLDER, options.task, options.threads)
        service.batcher = Batcher(
            service.call, options.max_batch, options.max_wait, options.max_waiting, options.workers
        )
        print("ready", flush=True)
    except Exception:
        traceback.print_exc()
        service.failed = True
        service.shutdown()


def stop(service: Service) -> None:
    """Let the requests on their way be answered, as long as `grace` allows."""
    service.stopping = True
    service.server_close()
    end = time.monotonic() + service.options.grace
    with service.idle:
        while service.busy and (left := end - time.monotonic()) > 0:
            service.idle.wait(left)


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    options = options_of()
    if options.health:
        return 0 if healthy(options) else 1
    try:
        service = Service(options)
    except OSError as error:
        print(f"error: cannot listen on {options.host}, port {options.port}: {error}", file=sys.stderr)
        return 2

    def ended(*_: Any) -> None:
        service.stopping = True
        threading.Thread(target=service.shutdown).start()  # it waits for the loop, in which this is called

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ended)
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"listening on http://{host}:{service.server_port}", flush=True)
    threading.Thread(target=load, args=(service,), daemon=True).start()  # which prints a line, the second
    service.serve_forever(0.1)
    stop(service)
    return 1 if service.failed else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # not through the end of Python: a thread may still be inside of the model
