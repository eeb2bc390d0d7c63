"""The HTTP requests of the service: answers, errors with their status, and metrics.

Metrics have the text format of Prometheus (version 0.0.4).
"""

from __future__ import annotations

import io
import json
import math
import re
import socket
import sys
import threading
import time
import traceback
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from smelt.export.package.standalone.packaged_model import (
    IMAGES,
    Batcher,
    PackagedModel,
    QueueFullError,
    describe_value,
)

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
# name -> kind, help text, and for a histogram the upper bounds of its buckets
METRIC_SPECS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "smelt_requests_total": ("counter", "Answered requests, by path and status.", ()),
    "smelt_request_seconds": (
        "histogram",
        "Time from the headers of a prediction to its answer.",
        LATENCY_BUCKETS,
    ),
    "smelt_inputs_total": ("counter", "Inputs (texts, pairs, images) that were answered.", ()),
    "smelt_batch_size": ("histogram", "Inputs in a call of the model.", BATCH_BUCKETS),
    "smelt_batch_seconds": ("histogram", "Time of a call of the model.", LATENCY_BUCKETS),
    "smelt_failures_total": ("counter", "Calls of the model that failed.", ()),
    "smelt_inputs_cut_total": ("counter", "Texts that were truncated.", ()),
    "smelt_requests_in_flight": ("gauge", "Requests being read or answered.", ()),
    "smelt_inputs_waiting": ("gauge", "Inputs waiting for a call of the model.", ()),
    "smelt_ready": ("gauge", "1 if the model is loaded.", ()),
}


class PrometheusMetrics:
    """Counters and histograms. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: dict[str, defaultdict[str, float]] = {name: defaultdict(float) for name in METRIC_SPECS}
        for name in ("smelt_inputs_total", "smelt_failures_total"):  # counters without labels start at 0
            self.counts[name][""] = 0
        self.buckets = {name: [0] * (len(ends) + 1) for name, (_, _, ends) in METRIC_SPECS.items() if ends}
        self.sums = dict.fromkeys(self.buckets, 0.0)

    def count(self, name: str, more: float = 1, **labels: str) -> None:
        """Add to a counter. labels: values must not contain a quote, backslash or line break."""
        with self.lock:
            self.counts[name][",".join(f'{key}="{value}"' for key, value in labels.items())] += more

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        with self.lock:
            self.buckets[name][bisect_left(METRIC_SPECS[name][2], value)] += 1
            self.sums[name] += value

    def render(self, now: Mapping[str, float]) -> str:
        """Return all metrics. now: gauges and counters whose values are computed elsewhere."""
        with self.lock:
            return "".join(self.render_metric(name, now) for name in METRIC_SPECS)

    def render_metric(self, name: str, now: Mapping[str, float]) -> str:
        """Return the lines of a metric."""
        kind, about, ends = METRIC_SPECS[name]
        lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        if ends:
            total = 0
            for end, number in zip((*map(str, ends), "+Inf"), self.buckets[name], strict=True):
                total += number
                lines.append(f'{name}_bucket{{le="{end}"}} {total}')
            lines += [f"{name}_sum {self.sums[name]}", f"{name}_count {total}"]
        elif name in now:
            lines.append(f"{name} {now[name]}")
        else:
            rows = self.counts[name]
            lines += [f"{name}{{{words}}} {rows[words]}" if words else f"{name} {rows['']}" for words in rows]
        return "\n".join(lines) + "\n"


PATHS = {"/": "GET", "/health": "GET", "/metrics": "GET", "/predict": "POST"}
RETRY_HEADERS = {"Retry-After": "1"}  # seconds
MAX_CONNECTIONS, SPARE_CONNECTIONS = 512, 16  # the spare ones are for /health, /metrics and refusals
# HEAD_S: from the last answer until the headers of the next request are complete; IDLE_S: with nothing sent
IDLE_S, HEAD_S, BODY_S, DRAIN_S = 30, 60, 60, 2
MAX_HEADER_BYTES = 65536  # bytes
HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r?\n")
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HttpError(Exception):
    """A request that is answered with the error `words`, a status and headers."""

    def __init__(self, status: int, words: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(words)
        self.status, self.headers = status, headers or {}


class InferenceServer(ThreadingHTTPServer):
    """A thread for each connection; the model runs in the threads of a `Batcher`.

    `model` and `batcher` are set when the model is loaded; `stopping` is set at the end.
    """

    daemon_threads, request_queue_size = True, 128
    model: PackagedModel | None = None
    batcher: Batcher | None = None
    stopping = failed = False

    def __init__(self, options: Any) -> None:
        """Listen. options: those of the command line."""
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family, address = found[0][0], found[0][4]
        self.options, self.measures = options, PrometheusMetrics()
        self.decoding = threading.Semaphore(options.workers)
        self.idle = threading.Condition()
        self.busy = self.held = 0  # held: bytes of bodies
        self.lock = threading.Lock()
        self.waiting: dict[Any, float] = {}  # connection -> since when it is idle, or inf
        super().__init__((str(address[0]), int(address[1])), RequestHandler)

    def server_bind(self) -> None:
        """Bind without a look-up of the host's name, which may take seconds."""
        self.allow_reuse_address = True
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, unless there are too many."""
        if not self.has_room(MAX_CONNECTIONS + SPARE_CONNECTIONS - 1):
            request.sendall(BUSY)
            self.shutdown_request(request)
            return
        with self.lock:
            self.waiting[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread can be started
            self.drop_connection(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.drop_connection(request)

    def has_room(self, most: int) -> bool:
        """Return whether at most `most` connections are open, if necessary after closing idle ones."""
        with self.lock:
            while len(self.waiting) > most:
                oldest = min(self.waiting, key=self.waiting.__getitem__)
                if self.waiting[oldest] == math.inf:
                    return False
                self.end_connection(oldest)
            return True

    def service_actions(self) -> None:
        """Close connections whose next request did not arrive in time; called by the accept loop."""
        with self.lock:
            late = time.monotonic() - HEAD_S
            for request in [request for request, since in self.waiting.items() if since < late]:
                self.end_connection(request)

    def end_connection(self, request: Any) -> None:
        """End a connection, while holding the lock; its thread then stops reading and ends."""
        del self.waiting[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def mark_idle(self, request: Any, since: float) -> bool:
        """Record since when a connection is idle; return False if it was closed meanwhile."""
        with self.lock:
            if waiting := request in self.waiting:
                self.waiting[request] = since
            return waiting

    def drop_connection(self, request: Any) -> None:
        """Remove a connection from the count."""
        with self.lock:
            self.waiting.pop(request, None)

    def reserve_bytes(self, count: int) -> bool:
        """Reserve bytes for bodies; return False if they are too many."""
        with self.idle:
            self.held += count
            return bool(self.held <= max(self.options.max_bodies, self.options.max_body))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, except if the client closed the connection."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            traceback.print_exc()

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Count a request as in flight, so that a shutdown waits for it."""
        with self.idle:
            self.busy += 1
        try:
            yield
        finally:
            with self.idle:
                self.busy -= 1
                self.idle.notify_all()

    def call(self, inputs: list[Any]) -> list[Any]:
        """Call the model and measure the time."""
        assert self.model is not None
        begin = time.perf_counter()
        try:
            return self.model.answer(inputs)
        except Exception:
            traceback.print_exc()
            self.measures.count("smelt_failures_total")
            raise
        finally:
            self.measures.observe("smelt_batch_size", len(inputs))
            self.measures.observe("smelt_batch_seconds", time.perf_counter() - begin)


class HeaderStream(io.BufferedIOBase):
    """The lines of headers, kept as they are read.

    The parser of the standard library stops at a line that is not a header, and at a lone carriage return.
    The rest is lost, including Content-Length, so a body would be read as the next request.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.lines = stream, [b""]

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line."""
        self.lines.append(self.stream.readline(size))
        if sum(map(len, self.lines)) > MAX_HEADER_BYTES:
            raise LineTooLong("head")
        return self.lines[-1]

    def is_complete(self) -> bool:
        """Return whether all lines are headers and the last one is empty."""
        *headers, last = self.lines[1:]
        return last in (b"\r\n", b"\n") and all(map(HEADER.fullmatch, headers))


class RequestHandler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version, server_version, sys_version = "HTTP/1.1", "smelt", ""
    timeout, disable_nagle_algorithm, wbufsize = IDLE_S, True, -1
    server: InferenceServer
    unread = held = 0  # bytes of the body: not yet received, received
    expecting = False  # the client sends its body only after "100 Continue"

    def handle_one_request(self) -> None:
        """Answer the next request, if it arrives in time."""
        self.server.mark_idle(self.connection, time.monotonic())
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read the headers of a request; refuse one that other software may parse differently."""
        stream, head = self.rfile, HeaderStream(self.rfile)
        self.rfile = head
        try:
            found = super().parse_request()
        finally:
            self.rfile = stream
        if found and not (head.is_complete() and self.has_one_host()):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        if not self.server.mark_idle(self.connection, math.inf):
            self.close_connection = True
            return False
        return found

    def has_one_host(self) -> bool:
        """Return whether there is exactly one Host; HTTP/1.0 may have none (RFC 9112, 3.2)."""
        hosts = len(self.headers.get_all("Host", []))
        return hosts == 1 or (hosts == 0 and self.request_version == "HTTP/1.0")

    def respond(self) -> None:
        """Answer a request of any method."""
        try:
            self.respond_measured()
        finally:
            self.server.reserve_bytes(-self.held)
            self.held = 0

    def respond_measured(self) -> None:
        """Answer a request and measure the time."""
        begin, path = time.perf_counter(), self.path.partition("?")[0]
        with self.server.track_request():
            try:
                self.unread = self.length()
                status, kind, body, headers = HTTPStatus.OK, *self.answer(path), {}
            except HttpError as error:
                status, headers = HTTPStatus(error.status), {**error.headers}
                kind, body = self.error(str(error))
            except Exception:
                traceback.print_exc()
                status, headers = HTTPStatus.INTERNAL_SERVER_ERROR, {}
                kind, body = self.error("internal error; see the service's log")
            self.server.measures.count(
                "smelt_requests_total", path=path if path in PATHS else "other", status=str(int(status))
            )
            if path == "/predict" and status == HTTPStatus.OK:
                self.server.measures.observe("smelt_request_seconds", time.perf_counter() - begin)
            self.send(status, kind, body, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = respond  # noqa: N815

    def answer(self, path: str) -> tuple[str, bytes]:
        """Return type and body of the answer."""
        server = self.server
        if path not in PATHS:
            raise HttpError(404, f"no such path; use {', '.join(PATHS)}")
        if self.command != PATHS[path] and (self.command, PATHS[path]) != ("HEAD", "GET"):
            allowed = "GET, HEAD" if PATHS[path] == "GET" else PATHS[path]
            raise HttpError(405, f"{path} supports {allowed}", {"Allow": allowed})
        if path == "/metrics":
            return "text/plain; version=0.0.4; charset=utf-8", server.measures.render(
                self.current_metrics()
            ).encode()
        if path == "/":
            return self.json({"task": server.options.task, "paths": PATHS})
        if server.stopping or server.model is None or server.batcher is None:
            raise HttpError(503, "stopping" if server.stopping else "the model is loading", RETRY_HEADERS)
        if path == "/health":
            return self.json({"status": "ok"})
        if not server.has_room(MAX_CONNECTIONS):
            raise HttpError(503, "too many connections; retry later", RETRY_HEADERS)
        return self.json({"outputs": self.predict(server.model, server.batcher)})

    def predict(self, model: PackagedModel, batcher: Batcher) -> list[Any]:
        """Return an answer for each input of the body."""
        inputs = self.inputs(model)
        most = self.server.options.max_waiting
        try:
            jobs = batcher.submit(inputs)
        except QueueFullError:
            raise HttpError(503, f"{most} inputs are already waiting; retry later", RETRY_HEADERS) from None
        end = time.monotonic() + self.server.options.timeout
        try:
            answers = [job.answer.result(max(0, end - time.monotonic())) for job in jobs]
        except TimeoutError:
            raise HttpError(
                503, f"timeout: no answer within {self.server.options.timeout:g} s", RETRY_HEADERS
            ) from None
        except Exception:  # `InferenceServer.call` has logged it
            raise HttpError(500, "the model failed on this input; see the service's log") from None
        finally:
            for job in jobs:
                job.answer.cancel()  # no client waits for these
        self.server.measures.count("smelt_inputs_total", len(answers))
        return answers

    def inputs(self, model: PackagedModel) -> list[Any]:
        """Return the inputs of the model."""
        kind = self.headers.get_content_type() if "Content-Type" in self.headers else "none"
        coding = self.headers.get("Content-Encoding", "identity")
        wanted = ("application/json", "image/*") if model.task == IMAGES else ("application/json",)
        image = kind.startswith("image/") and model.task == IMAGES
        if (kind != wanted[0] and not image) or coding != "identity":
            received = kind if coding == "identity" else f"{kind}, Content-Encoding: {coding}"
            raise HttpError(415, f"send Content-Type: {' or '.join(wanted)}; got {received}")
        body = self.body()
        if image:
            return [self.read("the body", model.image, body)]
        try:
            sent = json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is not JSON in UTF-8: {error}") from None
        if not isinstance(sent, dict) or set(sent) != {"inputs"} or not isinstance(sent["inputs"], list):
            raise HttpError(422, f'expected {{"inputs": [...]}}, got {describe_value(sent)}')
        values, most = sent["inputs"], self.server.options.max_waiting
        if len(values) > most:
            raise HttpError(422, f"at most {most} inputs are allowed in a request, got {len(values)}")
        return [self.read(f"inputs[{at}]", model.read, value) for at, value in enumerate(values)]

    def read(self, name: str, reader: Any, value: Any) -> Any:
        """Return the result of `reader` for an input."""
        try:
            with self.server.decoding:  # decoding an image needs memory
                return reader(value)
        except ValueError as error:
            raise HttpError(422, f"{name}: {error}") from None

    def length(self) -> int:
        """Return the length of the body in bytes."""
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise HttpError(411, "send the body with Content-Length, not in chunks")
        lengths = set(self.headers.get_all("Content-Length") or ["0"])
        if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,15}", next(iter(lengths))):
            self.close_connection = True
            raise HttpError(400, "Content-Length is not a number")
        return int(lengths.pop())

    def body(self) -> bytes:
        """Read the body."""
        most = self.server.options.max_body
        if "Content-Length" not in self.headers:
            raise HttpError(411, "send the body with Content-Length")
        if self.unread > most:
            raise HttpError(413, f"the body has {self.unread:,} bytes; at most {most:,} are allowed")
        if self.expecting:
            self.send_response_only(HTTPStatus.CONTINUE)
            self.end_headers()
            self.wfile.flush()
            self.expecting = False
        found, end = bytearray(), time.monotonic() + BODY_S
        try:
            while self.unread and time.monotonic() < end:
                part = self.rfile.read1(min(self.unread, 65536))
                if not part:
                    break
                found += part
                self.unread -= len(part)
                self.held += len(part)
                if not self.server.reserve_bytes(len(part)):
                    raise HttpError(503, "too many bodies at the same time; retry later", RETRY_HEADERS)
        except TimeoutError:
            pass
        if self.unread:
            raise HttpError(408, f"{self.unread:,} bytes of the body were not received in time")
        return bytes(found)

    def handle_expect_100(self) -> bool:
        """Delay "100 Continue" until the body is read: not if the request is refused before."""
        self.expecting = True
        return True

    def send(self, status: HTTPStatus, kind: str, body: bytes, headers: dict[str, str]) -> None:
        """Send an answer; if a part of the body is unread, the connection is closed."""
        self.close_connection |= bool(self.unread) or self.server.stopping
        self.send_response_only(status)
        self.send_header("Server", self.version_string())
        self.send_header("Date", self.date_time_string())
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers | ({"Connection": "close"} if self.close_connection else {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()
        self.drain()

    def drain(self) -> None:
        """Read the rest of a body for a while: a client that still sends does not read the answer."""
        if not self.unread or self.expecting:
            self.expecting = False
            return
        end = time.monotonic() + DRAIN_S
        self.connection.settimeout(DRAIN_S)
        try:
            while self.unread > 0 and time.monotonic() < end and (part := self.rfile.read1(65536)):
                self.unread -= len(part)
        except OSError:
            pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that http.server rejects."""
        status = HTTPStatus(code)
        if self.request_version == "HTTP/0.9":
            self.request_version = "HTTP/1.1"
        self.close_connection, self.unread = True, 0
        self.server.measures.count("smelt_requests_total", path="other", status=str(code))
        self.send(status, *self.error(status.phrase), {})

    def current_metrics(self) -> dict[str, float]:
        """Return the metrics that are computed on request."""
        server = self.server
        waiting = len(server.batcher.jobs) if server.batcher else 0
        return {
            "smelt_requests_in_flight": server.busy,
            "smelt_inputs_waiting": waiting,
            "smelt_ready": int(server.batcher is not None and not server.stopping),
            "smelt_inputs_cut_total": server.model.cut if server.model else 0,
        }

    def json(self, value: Any) -> tuple[str, bytes]:
        """Return type and body of an answer in JSON."""
        return "application/json", json.dumps(value, ensure_ascii=False).encode(errors="replace") + b"\n"

    def error(self, words: str) -> tuple[str, bytes]:
        """Return type and body of an error."""
        return self.json({"error": words})

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: /metrics counts them."""
