"""HTTP service for the model in this folder: python serve.py, then POST /predict with {"inputs": [...]}.

Every option can also be set as an environment variable: --max-batch as MAX_BATCH.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import uvicorn

from smelt.export.package.standalone.http_service import HeaderTimeoutProtocol, InferenceService
from smelt.export.package.standalone.packaged_model import PackagedModel

MODEL_FOLDER = Path(__file__).parent
KEEP_ALIVE_S = 30


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

    def number(text: str) -> int:
        if least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")

    return number


def parse_seconds(text: str) -> float:
    """Parse an option in seconds."""
    if 0 <= float(text) < float("inf"):
        return float(text)
    raise argparse.ArgumentTypeError(f"expected seconds, got {text}")


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options: of the command line, else of the environment, else the defaults."""
    config = json.loads((MODEL_FOLDER / "infer.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(prog="serve.py", description=__doc__)

    def add(name: str, default: Any, kind: Any, about: str) -> None:
        default_text = os.environ.get(name.upper().replace("-", "_"), str(default))
        parser.add_argument(
            f"--{name}", default=default_text, type=kind, help=f"{about} (default: {default})"
        )

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
    add("grace", 8, int_option(0), "seconds to finish requests in flight after SIGTERM")
    options = parser.parse_args(words)
    options.task, options.model_class = config["task"], config["class"]
    shares_batches = options.max_batch > 1 and not options.separate_requests
    options.depends_on_requests = shares_batches and config.get("depends_on_batch", False)
    options.workers = options.workers or max(1, available_cores() // options.threads)
    return options


def load_model(service: InferenceService, server: uvicorn.Server) -> None:
    """Load the model; stop the server if that fails."""
    try:
        service.load(PackagedModel(MODEL_FOLDER, service.options.model_class, service.options.threads))
        print("ready", flush=True)
    except Exception:
        traceback.print_exc()
        service.failed = server.should_exit = True


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    options = parse_options()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        print(f"error: cannot listen on {options.host}, port {options.port}: {error}", file=sys.stderr)
        return 2
    # uvicorn sends a response in two parts. Connections inherit the option; asyncio sets it only on sockets
    # that name their protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    service = InferenceService(options)
    server = uvicorn.Server(
        uvicorn.Config(
            service,
            http=HeaderTimeoutProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=options.grace,
        )
    )

    def stop(*_: Any) -> None:
        server.should_exit = True

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, stop)  # uvicorn raises the signal again when it has stopped
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"listening on http://{host}:{listener.getsockname()[1]}", flush=True)
    if options.depends_on_requests:
        text = "note: answers depend on other requests in their batch; --separate-requests 1 avoids that"
        print(text, file=sys.stderr, flush=True)
    # it prints the second line
    threading.Thread(target=load_model, args=(service, server), daemon=True).start()
    server.run([listener])
    return int(service.failed)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # not a normal exit of Python: a thread may still be inside the model
