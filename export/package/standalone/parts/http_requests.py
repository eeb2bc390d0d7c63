"""What the service answers to a request: errors in words, with the status that HTTP has for them."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from smelt.export.package.standalone.parts.batcher import Batcher, FullError
from smelt.export.package.standalone.parts.measures import Measures
from smelt.export.package.standalone.parts.packaged_model import IMAGES, PackagedModel, shown

PATHS = {"/": "GET", "/health": "GET", "/metrics": "GET", "/predict": "POST"}
AGAIN = {"Retry-After": "1"}  # seconds
MOST_CONNECTIONS, SPARE_CONNECTIONS = 512, 16  # the spare ones are for /health, /metrics and refusals
# HEAD_S: from the last answer until the head of the next request is whole; IDLE_S: with nothing sent
IDLE_S, HEAD_S, BODY_S, DRAIN_S = 30, 60, 60, 2
MOST_HEAD = 65536  # bytes
HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r?\n")
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class RefusedError(Exception):
    """A request that gets no answer but `words`, with a status and headers."""

    def __init__(self, status: int, words: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(words)
        self.status, self.headers = status, headers or {}


class Service(ThreadingHTTPServer):
    """A thread for each connection, the model in threads of its own behind a `Batcher`.

    `model` and `batcher` are there as soon as the model is loaded; `stopping` is set at the end.
    """

    daemon_threads, request_queue_size = True, 128
    model: PackagedModel | None = None
    batcher: Batcher | None = None
    stopping = failed = False

    def __init__(self, options: Any) -> None:
        """Listen; options: those of the command line."""
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family, address = found[0][0], found[0][4]
        self.options, self.measures = options, Measures()
        self.decoding = threading.Semaphore(options.workers)
        self.idle = threading.Condition()
        self.busy = self.held = 0  # held: bytes of bodies
        self.lock = threading.Lock()
        self.waiting: dict[Any, float] = {}  # connection -> since when its next request is waited for, or inf
        super().__init__((str(address[0]), int(address[1])), Handler)

    def server_bind(self) -> None:
        """Bind, without a look-up of the host's name, which may take seconds."""
        self.allow_reuse_address = True
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread, where there are not too many."""
        if not self.has_room(MOST_CONNECTIONS + SPARE_CONNECTIONS - 1):
            request.sendall(BUSY)
            self.shutdown_request(request)
            return
        with self.lock:
            self.waiting[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread can be started
            self.forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.forget(request)

    def has_room(self, most: int) -> bool:
        """Say whether at most `most` connections are open, where need be after idle ones were closed."""
        with self.lock:
            while len(self.waiting) > most:
                oldest = min(self.waiting, key=self.waiting.__getitem__)
                if self.waiting[oldest] == math.inf:
                    return False
                self.cut(oldest)
            return True

    def service_actions(self) -> None:
        """Close connections whose next request did not come in time; called by the loop that accepts."""
        with self.lock:
            late = time.monotonic() - HEAD_S
            for request in [request for request, since in self.waiting.items() if since < late]:
                self.cut(request)

    def cut(self, request: Any) -> None:
        """End a connection, under the lock; its thread then reads no more and ends."""
        del self.waiting[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def waits(self, request: Any, since: float) -> bool:
        """Note since when a connection waits for its next request; False: it was closed meanwhile."""
        with self.lock:
            if there := request in self.waiting:
                self.waiting[request] = since
            return there

    def forget(self, request: Any) -> None:
        """Count a connection no more."""
        with self.lock:
            self.waiting.pop(request, None)

    def hold(self, count: int) -> bool:
        """Count bytes of bodies; False: they are too many."""
        with self.idle:
            self.held += count
            return bool(self.held <= max(self.options.max_bodies, self.options.max_body))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong; that a client went away is none of it."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            traceback.print_exc()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count a request among those that are waited for at the end."""
        with self.idle:
            self.busy += 1
        try:
            yield
        finally:
            with self.idle:
                self.busy -= 1
                self.idle.notify_all()

    def call(self, inputs: list[Any]) -> list[Any]:
        """Call the model, measured."""
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


class Head(io.BufferedIOBase):
    """The lines of headers, kept as they are read.

    The parser of the standard library ends at a line that is no header, and at a carriage return alone. What
    follows is lost, its Content-Length too, so that a body would be read as the next request.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.lines = stream, [b""]

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line."""
        self.lines.append(self.stream.readline(size))
        if sum(map(len, self.lines)) > MOST_HEAD:
            raise LineTooLong("head")
        return self.lines[-1]

    def whole(self) -> bool:
        """Say whether all lines are headers, and the last one is empty."""
        *headers, last = self.lines[1:]
        return last in (b"\r\n", b"\n") and all(map(HEADER.fullmatch, headers))


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version, server_version, sys_version = "HTTP/1.1", "smelt", ""
    timeout, disable_nagle_algorithm, wbufsize = IDLE_S, True, -1
    server: Service
    unread = held = 0  # bytes of the body: still to come, read
    expecting = False  # the client sends its body only when it is told to

    def handle_one_request(self) -> None:
        """Answer the next request, if it comes in time."""
        self.server.waits(self.connection, time.monotonic())
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read the head of a request; one that others may understand in another way is refused."""
        stream, head = self.rfile, Head(self.rfile)
        self.rfile = head
        try:
            found = super().parse_request()
        finally:
            self.rfile = stream
        if found and not head.whole():
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        if not self.server.waits(self.connection, math.inf):
            self.close_connection = True
            return False
        return found

    def respond(self) -> None:
        """Answer a request of any method."""
        try:
            self.respond_measured()
        finally:
            self.server.hold(-self.held)
            self.held = 0

    def respond_measured(self) -> None:
        """Answer a request, and measure how long that takes."""
        begin, path = time.perf_counter(), self.path.partition("?")[0]
        with self.server.at_work():
            try:
                self.unread = self.length()
                status, kind, body, headers = HTTPStatus.OK, *self.answer(path), {}
            except RefusedError as error:
                status, headers = HTTPStatus(error.status), {**error.headers}
                kind, body = self.error(str(error))
            except Exception:
                traceback.print_exc()
                status, headers = HTTPStatus.INTERNAL_SERVER_ERROR, {}
                kind, body = self.error("the service failed; its log says how")
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
            raise RefusedError(404, f"no such path; there are {', '.join(PATHS)}")
        if self.command != PATHS[path] and (self.command, PATHS[path]) != ("HEAD", "GET"):
            allowed = "GET, HEAD" if PATHS[path] == "GET" else PATHS[path]
            raise RefusedError(405, f"{path} takes {allowed}", {"Allow": allowed})
        if path == "/metrics":
            return "text/plain; version=0.0.4; charset=utf-8", server.measures.text(self.now()).encode()
        if path == "/":
            return self.json({"task": server.options.task, "paths": PATHS})
        if server.stopping or server.model is None or server.batcher is None:
            raise RefusedError(503, "stopping" if server.stopping else "the model is being loaded", AGAIN)
        if path == "/health":
            return self.json({"status": "ok"})
        if not server.has_room(MOST_CONNECTIONS):
            raise RefusedError(503, "too many connections; ask again", AGAIN)
        return self.json({"outputs": self.predict(server.model, server.batcher)})

    def predict(self, model: PackagedModel, batcher: Batcher) -> list[Any]:
        """Return an answer for each input of the body."""
        inputs = self.inputs(model)
        most = self.server.options.max_waiting
        if len(inputs) > most:
            raise RefusedError(422, f"at most {most} inputs in a request, read {len(inputs)}")
        try:
            jobs = batcher.submit(inputs)
        except FullError:
            raise RefusedError(503, f"{most} inputs are waiting already; ask again", AGAIN) from None
        end = time.monotonic() + self.server.options.timeout
        try:
            answers = [job.answer.result(max(0, end - time.monotonic())) for job in jobs]
        except TimeoutError:
            raise RefusedError(503, f"no answer within {self.server.options.timeout:g} s", AGAIN) from None
        except Exception:  # `Service.call` has logged it
            raise RefusedError(500, "the model failed on this input; the service's log says how") from None
        finally:
            for job in jobs:
                job.answer.cancel()  # those that nobody waits for
        self.server.measures.count("smelt_inputs_total", len(answers))
        return answers

    def inputs(self, model: PackagedModel) -> list[Any]:
        """Return what the model is called with."""
        kind = self.headers.get_content_type() if "Content-Type" in self.headers else "none"
        coding = self.headers.get("Content-Encoding", "identity")
        wanted = ("application/json", "image/*") if model.task == IMAGES else ("application/json",)
        image = kind.startswith("image/") and model.task == IMAGES
        if (kind != wanted[0] and not image) or coding != "identity":
            said = kind if coding == "identity" else f"{kind}, Content-Encoding: {coding}"
            raise RefusedError(415, f"send Content-Type: {' or '.join(wanted)}; read {said}")
        body = self.body()
        if image:
            return [self.read("the body", model.image, body)]
        try:
            sent = json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the body is no JSON in UTF-8: {error}") from None
        if not isinstance(sent, dict) or set(sent) != {"inputs"} or not isinstance(sent["inputs"], list):
            raise RefusedError(422, f'expected {{"inputs": [...]}}, read {shown(sent)}')
        return [self.read(f"inputs[{at}]", model.read, value) for at, value in enumerate(sent["inputs"])]

    def read(self, name: str, reader: Any, value: Any) -> Any:
        """Return what `reader` makes of an input."""
        try:
            with self.server.decoding:  # an image that is decoded takes memory
                return reader(value)
        except ValueError as error:
            raise RefusedError(422, f"{name}: {error}") from None

    def length(self) -> int:
        """Return how many bytes the body has."""
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise RefusedError(411, "send the body with Content-Length, not in chunks")
        said = set(self.headers.get_all("Content-Length") or ["0"])
        if len(said) > 1 or not re.fullmatch(r"[0-9]{1,15}", next(iter(said))):
            self.close_connection = True
            raise RefusedError(400, "Content-Length is no number")
        return int(said.pop())

    def body(self) -> bytes:
        """Read the body."""
        most = self.server.options.max_body
        if "Content-Length" not in self.headers:
            raise RefusedError(411, "send the body with Content-Length")
        if self.unread > most:
            raise RefusedError(413, f"a body of {self.unread:,} bytes; at most {most:,} are read")
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
                if not self.server.hold(len(part)):
                    raise RefusedError(503, "too many bodies at the same time; ask again", AGAIN)
        except TimeoutError:
            pass
        if self.unread:
            raise RefusedError(408, f"{self.unread:,} bytes of the body did not come")
        return bytes(found)

    def handle_expect_100(self) -> bool:
        """Let the body come when it is read: not where the request is refused before."""
        self.expecting = True
        return True

    def send(self, status: HTTPStatus, kind: str, body: bytes, headers: dict[str, str]) -> None:
        """Send an answer; what was not read of the body ends the connection."""
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
        """Read for a while what else is sent: a client that still sends does not read the answer."""
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
        """Answer what is no HTTP that is known here, as http.server found."""
        status = HTTPStatus(code)
        if self.request_version == "HTTP/0.9":
            self.request_version = "HTTP/1.1"
        self.close_connection, self.unread = True, 0
        self.server.measures.count("smelt_requests_total", path="other", status=str(code))
        self.send(status, *self.error(status.phrase), {})

    def now(self) -> dict[str, float]:
        """Return the metrics that are asked for and not counted."""
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
