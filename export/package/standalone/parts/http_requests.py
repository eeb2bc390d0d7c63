"""What the service answers to a request: errors in words, with the status that HTTP has for them."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from smelt.export.package.standalone.parts.batcher import Batcher, FullError
from smelt.export.package.standalone.parts.measures import Measures
from smelt.export.package.standalone.parts.packaged_model import IMAGES, PackagedModel, shown

PATHS = {"/": "GET", "/health": "GET", "/metrics": "GET", "/predict": "POST"}
AGAIN = {"Retry-After": "1"}  # seconds
MOST_CONNECTIONS, IDLE_S, BODY_S, DRAIN_S = 512, 30, 60, 2
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
        self.room, self.decoding = threading.Semaphore(MOST_CONNECTIONS), threading.Semaphore(options.workers)
        self.idle = threading.Condition()
        self.busy = 0
        super().__init__((str(address[0]), int(address[1])), Handler)

    def server_bind(self) -> None:
        """Bind, without a look-up of the host's name, which may take seconds."""
        self.allow_reuse_address = True
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread, where there are not too many."""
        if not self.room.acquire(blocking=False):
            request.sendall(BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread can be started
            self.room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

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


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version, server_version, sys_version = "HTTP/1.1", "smelt", ""
    timeout, disable_nagle_algorithm, wbufsize = IDLE_S, True, -1
    server: Service
    unread = 0  # bytes of the body
    expecting = False  # the client sends its body only when it is told to

    def respond(self) -> None:
        """Answer a request of any method."""
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
