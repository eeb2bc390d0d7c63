"""The routes, limits and metrics of the service. uvicorn and h11 read the requests."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from smelt.export.package.standalone.json_values import describe_value
from smelt.export.package.standalone.packaged_model import Batcher, PackagedModel, QueueFullError

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
PATHS = {"/": "GET", "/health": "GET", "/metrics": "GET", "/predict": "POST"}
RETRY_HEADERS = {"Retry-After": "1"}  # seconds
MAX_PREDICTIONS = 512  # in flight; a limit of connections would also refuse /health and /metrics
HEADER_TIMEOUT_S, BODY_TIMEOUT_S = 60, 60
# A proxy may read such a request differently (RFC 9112, 6.3), so the connection is closed.
CHUNKED_RESPONSE = JSONResponse(
    {"error": "send the body with Content-Length, not in chunks"}, 411, {"Connection": "close"}
)


class HeaderTimeoutProtocol(H11Protocol):
    """Closes a connection if the header of its next request is not complete in time.

    uvicorn has a timeout for connections on which nothing arrives after a response, but not for others.
    """

    header_timer: asyncio.TimerHandle

    def start_header_timer(self) -> None:
        """Start to wait for a header."""
        self.header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self.start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self.header_timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Stop waiting if a request is to be answered."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self.header_timer.cancel()

    def on_response_complete(self) -> None:
        """Wait for the next request, which may have arrived already."""
        self.header_timer.cancel()
        self.start_header_timer()
        super().on_response_complete()


class TruncatedTexts(Collector):
    """The counter of truncated texts, which the model counts."""

    def __init__(self, count: Callable[[], int]) -> None:
        self.count = count

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter."""
        yield CounterMetricFamily("smelt_inputs_cut", "Texts that were truncated.", self.count())


class ServiceMetrics:
    """The metrics of Prometheus. Thread-safe."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "smelt_requests", "Answered requests, by path and status.", ("path", "status"), registry=registry
        )
        self.request_seconds = Histogram(
            "smelt_request_seconds",
            "Time from the headers of a prediction to its answer.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        description = "Inputs (texts, pairs, files) that were answered."
        self.inputs = Counter("smelt_inputs", description, registry=registry)
        self.batch_size = Histogram(
            "smelt_batch_size", "Inputs in a call of the model.", buckets=BATCH_BUCKETS, registry=registry
        )
        self.batch_seconds = Histogram(
            "smelt_batch_seconds", "Time of a call of the model.", buckets=LATENCY_BUCKETS, registry=registry
        )
        self.failures = Counter("smelt_failures", "Calls of the model that failed.", registry=registry)
        description = "Requests being read or answered."
        self.requests_in_flight = Gauge("smelt_requests_in_flight", description, registry=registry)
        description = "Inputs waiting for a call of the model."
        self.inputs_waiting = Gauge("smelt_inputs_waiting", description, registry=registry)
        self.ready = Gauge("smelt_ready", "1 if the model is loaded.", registry=registry)


class InferenceService:
    """The ASGI application. `load` sets the model and the batcher, whose threads run it."""

    model: PackagedModel | None = None
    batcher: Batcher | None = None
    failed = False  # to load the model

    def __init__(self, options: Any) -> None:
        """Prepare the routes. options: those of the command line."""
        self.options, self.metrics = options, ServiceMetrics()
        self.predictions = self.body_bytes = 0  # in flight
        self.decoders = ThreadPoolExecutor(options.workers)
        self.app = Starlette(
            routes=[
                Route("/", self.describe),
                Route("/health", self.health),
                Route("/metrics", self.render_metrics),
                Route("/predict", self.predict, methods=["POST"]),
            ],
            exception_handlers={HTTPException: error_response, Exception: error_response},
        )

    def load(self, model: PackagedModel) -> None:
        """Start to answer predictions."""
        options = self.options
        self.model = model
        self.batcher = Batcher(
            self.call,
            options.max_batch,
            options.max_wait,
            options.max_waiting,
            options.workers,
            bool(options.separate_requests),
        )
        self.metrics.registry.register(TruncatedTexts(lambda: model.cut))
        self.metrics.inputs_waiting.set_function(self.batcher.jobs.__len__)
        self.metrics.ready.set(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request and measure it."""
        start, status = time.perf_counter(), 500

        async def send_measured(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        app = CHUNKED_RESPONSE if "transfer-encoding" in Headers(scope=scope) else self.app
        path = scope["path"] if scope["path"] in PATHS else "other"
        with self.metrics.requests_in_flight.track_inprogress():
            try:
                await app(scope, receive, send_measured)
            finally:
                self.metrics.requests.labels(path, status).inc()
                if path == "/predict" and status == 200:
                    self.metrics.request_seconds.observe(time.perf_counter() - start)

    async def describe(self, request: Request) -> Response:
        """Return the task and the paths."""
        return JSONResponse({"task": self.options.task, "paths": PATHS})

    async def health(self, request: Request) -> Response:
        """Return 200 if the model is loaded."""
        self.loaded()
        return JSONResponse({"status": "ok"})

    async def render_metrics(self, request: Request) -> Response:
        """Return the metrics in the text format of Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def predict(self, request: Request) -> Response:
        """Return the outputs for the inputs of a request, within the limits of the options."""
        model, batcher = self.loaded()
        if self.predictions >= MAX_PREDICTIONS:
            raise HTTPException(503, "too many requests at the same time; retry later", RETRY_HEADERS)
        self.predictions += 1
        body = bytearray()
        try:
            inputs = await self.read_inputs(request, model, body)
            return JSONResponse({"outputs": await self.answers(batcher, inputs)})
        finally:
            self.body_bytes -= len(body)
            self.predictions -= 1

    def loaded(self) -> tuple[PackagedModel, Batcher]:
        """Return the model and the batcher; raise an error 503 while the model is loading."""
        if self.model is None or self.batcher is None:
            raise HTTPException(503, "the model is loading", RETRY_HEADERS)
        return self.model, self.batcher

    async def answers(self, batcher: Batcher, inputs: list[Any]) -> list[Any]:
        """Return the model's answer for each input."""
        options = self.options
        try:
            jobs = batcher.submit(inputs)
        except QueueFullError:
            message = f"{options.max_waiting} inputs are already waiting; retry later"
            raise HTTPException(503, message, RETRY_HEADERS) from None
        try:
            async with asyncio.timeout(options.timeout):
                answers = [await asyncio.wrap_future(job.answer) for job in jobs]
        except TimeoutError:
            message = f"timeout: no answer within {options.timeout:g} s"
            raise HTTPException(503, message, RETRY_HEADERS) from None
        except Exception:  # `call` has logged it
            raise HTTPException(500, "the model failed on this input; see the service's log") from None
        finally:
            for job in jobs:
                job.answer.cancel()  # no client waits for these
        self.metrics.inputs.inc(len(answers))
        return answers

    def call(self, inputs: list[Any]) -> list[Any]:
        """Call the model and measure the time."""
        assert self.model is not None
        self.metrics.batch_size.observe(len(inputs))
        try:
            with self.metrics.batch_seconds.time(), self.metrics.failures.count_exceptions():
                return self.model.answer(inputs)
        except Exception:
            traceback.print_exc()
            raise

    async def read_inputs(self, request: Request, model: PackagedModel, body: bytearray) -> list[Any]:
        """Return the inputs of the model. body: where the request's body is stored."""
        kind = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
        coding = request.headers.get("content-encoding", "identity")
        is_file = kind.startswith(f"{model.media}/") and model.read_file is not None
        if (kind != "application/json" and not is_file) or coding != "identity":
            expected = f"application/json or {model.media}/*" if model.read_file else "application/json"
            content_type = kind if coding == "identity" else f"{kind}, Content-Encoding: {coding}"
            raise HTTPException(415, f"send Content-Type: {expected}; got {content_type}")
        await self.read_body(request, body)
        if model.read_file is not None and is_file:
            return [await self.read("the body", model.read_file, bytes(body))]
        try:
            content = json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is not JSON in UTF-8: {error}") from None
        if not isinstance(content, dict) or set(content) != {"inputs"}:
            raise HTTPException(422, f'expected {{"inputs": [...]}}, got {describe_value(content)}')
        values, max_inputs = content["inputs"], self.options.max_waiting
        if not isinstance(values, list):
            raise HTTPException(422, f"inputs: expected a list, got {describe_value(values)}")
        if len(values) > max_inputs:
            raise HTTPException(
                422, f"at most {max_inputs} inputs are allowed in a request, got {len(values)}"
            )
        return [await self.read(f"inputs[{i}]", model.read, value) for i, value in enumerate(values)]

    async def read(self, name: str, reader: Callable[[Any], Any], value: Any) -> Any:
        """Return the result of `reader` for an input; files are decoded in threads, `workers` at a time."""
        try:
            if self.model is None or self.model.read_file is None:
                return reader(value)
            return await asyncio.get_running_loop().run_in_executor(self.decoders, reader, value)
        except ValueError as error:
            raise HTTPException(422, f"{name}: {error}") from None

    async def read_body(self, request: Request, body: bytearray) -> None:
        """Append the body of a request to `body`."""
        options, length = self.options, int(request.headers.get("content-length", -1))
        if length < 0:
            raise HTTPException(411, "send the body with Content-Length")
        if length > options.max_body:
            message = f"the body has {length:,} bytes; at most {options.max_body:,} are allowed"
            raise HTTPException(413, message)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.stream():
                    body += part
                    self.body_bytes += len(part)
                    if self.body_bytes > max(options.max_bodies, options.max_body):
                        message = "too many bodies at the same time; retry later"
                        raise HTTPException(503, message, RETRY_HEADERS)
        except (TimeoutError, ClientDisconnect):
            message = f"{length - len(body):,} bytes of the body were not received in time"
            raise HTTPException(408, message, {"Connection": "close"}) from None


def error_response(request: Request, error: Exception) -> Response:
    """Return the response for an error; uvicorn logs those without a status."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    return JSONResponse({"error": "internal error; see the service's log"}, 500)
