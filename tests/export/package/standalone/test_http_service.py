"""What limits the requests of a service, in this process."""

import http.client
import re
import socket
import threading
import time
from argparse import Namespace
from contextlib import contextmanager, suppress

import pytest
import uvicorn

from smelt.export.package.standalone import http_service
from smelt.export.package.standalone.http_service import HeaderTimeoutProtocol, InferenceService
from smelt.export.package.standalone.packaged_model import Batcher

JSON = {"Content-Type": "application/json"}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Model:
    cut, read_file, media = 0, None, "image"

    def read(self, value):
        return value

    def answer(self, inputs):
        return inputs


@contextmanager
def serving():
    options = Namespace(
        workers=1, task="translation", max_batch=4, max_wait=0, separate_requests=0, max_body=1000,
        max_bodies=1000, max_waiting=8, timeout=60,
    )  # fmt: skip
    service = InferenceService(options)
    service.load(Model())
    server = uvicorn.Server(
        uvicorn.Config(service, http=HeaderTimeoutProtocol, loop="asyncio", lifespan="off", log_config=None)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service.port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield service
        finally:
            server.should_exit = True
            thread.join()


def connect(service):
    return socket.create_connection(("127.0.0.1", service.port), timeout=60)


def request(service, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.request(method, path, body, JSON)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


def predict_header(length):
    lines = (
        "POST /predict HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return "\r\n".join([*lines, "", ""]).encode()


@contextmanager
def sending(service, body=b"", length=14):
    """A connection that has sent a part of a body, which is being read."""
    with connect(service) as connection:
        connection.sendall(predict_header(length) + body)
        wait_for(lambda: (service.predictions, service.body_bytes) == (1, len(body)))
        yield connection


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def receive_all(connection):
    response = b""
    with suppress(ConnectionResetError):  # closed before the service has read all
        while chunk := connection.recv(4096):
            response += chunk
    return response


@pytest.fixture(scope="module")
def idle_service():
    with serving() as service:
        yield service


def test_predictions_above_limit_return_503_while_health_returns_200(monkeypatch):
    monkeypatch.setattr(http_service, "MAX_PREDICTIONS", 1)
    with serving() as service, sending(service) as first:
        response = request(service, "POST", "/predict", b'{"inputs": []}')
        assert (response.status, response.getheader("Retry-After")) == (503, "1")
        assert request(service, "GET", "/health").status == 200
        first.sendall(b'{"inputs": []}')
        assert first.recv(4096).startswith(b"HTTP/1.1 200 ")
        wait_for(lambda: service.predictions == 0)
        assert request(service, "POST", "/predict", b'{"inputs": []}').status == 200


def test_total_size_of_request_bodies_is_limited():
    with serving() as service, sending(service, b" " * 600, 1000) as first:
        for count, status in ((500, 503), (300, 200), (300, 200)):
            assert request(service, "POST", "/predict", b'{"inputs": []}'.ljust(count)).status == status
            wait_for(lambda: service.body_bytes == 600)  # released after the response
        first.sendall(b'{"inputs": []}'.ljust(400))
        assert first.recv(4096).startswith(b"HTTP/1.1 200 ")
        wait_for(lambda: not service.body_bytes)


def test_body_that_is_not_received_in_time_returns_408(monkeypatch):
    monkeypatch.setattr(http_service, "BODY_TIMEOUT_S", 0.05)
    with serving() as service:
        with connect(service) as connection:
            connection.sendall(predict_header(14) + b'{"inputs"')
            assert receive_all(connection).startswith(b"HTTP/1.1 408 ")
        assert request(service, "GET", "/health").status == 200
        assert service.body_bytes == service.predictions == 0


def test_client_disconnecting_while_sending_its_body_releases_it():
    with serving() as service:
        with sending(service, b'{"inputs"'):
            pass
        wait_for(lambda: service.body_bytes == service.predictions == 0)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX: a"])
@pytest.mark.parametrize("after_response", [False, True])
def test_incomplete_request_header_closes_the_connection(sent, after_response, monkeypatch):
    with serving() as service:
        if not after_response:
            monkeypatch.setattr(http_service, "HEADER_TIMEOUT_S", 0.05)
        with connect(service) as connection:
            if after_response:
                assert request(service, "GET", "/health").status == 200  # both connections are accepted
                monkeypatch.setattr(http_service, "HEADER_TIMEOUT_S", 0.05)
                connection.sendall(HEALTH)
                response = b""
                while not response.endswith(b"}"):
                    response += connection.recv(4096)
            connection.sendall(sent)
            assert receive_all(connection) == b""


@pytest.mark.parametrize("first", [b"", HEALTH])
def test_prediction_longer_than_header_timeout_is_answered(first, monkeypatch):
    """Also one that was sent before the first request was answered."""
    monkeypatch.setattr(Model, "answer", lambda self, inputs: time.sleep(1.2) or inputs)
    monkeypatch.setattr(http_service, "HEADER_TIMEOUT_S", 0.8)
    with serving() as service, connect(service) as connection:
        connection.sendall(first + predict_header(15) + b'{"inputs": [1]}')
        assert b'{"outputs":[1]}' in receive_all(connection)


@pytest.mark.parametrize(
    "sent", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\n", HEALTH[:-2] + b"X: " + b"a" * 70_000]
)
def test_malformed_or_long_header_returns_400(sent, idle_service):
    with connect(idle_service) as connection:
        connection.sendall(sent)
        assert receive_all(connection).startswith(b"HTTP/1.1 400 ")


def test_too_many_inputs_return_422_before_any_is_decoded(monkeypatch):
    monkeypatch.setattr(Model, "read", lambda self, value: pytest.fail("an input was read"))
    with serving() as service:
        assert request(service, "POST", "/predict", b'{"inputs": [1,2,3,4,5,6,7,8,9]}').status == 422


@pytest.mark.parametrize("method", ["GET /health", "GET /metrics", "POST /predict", "POST /other"])
@pytest.mark.parametrize(("headers", "status"), [
    ("Content-Length: 5\r\nTransfer-Encoding: chunked", b"411"),
    ("Transfer-Encoding: chunked\r\nContent-Length: 5", b"411"), ("Transfer-Encoding: chunked", b"411"),
    ("Transfer-Encoding: identity\r\nContent-Length: 5", b"400"),
    ("Content-Length: 5\r\nContent-Length: 6", b"400"), ("Content-Length : 5", b"400"),
    ("X: a\rContent-Length: 5", b"400"),
])  # fmt: skip
def test_body_of_ambiguous_length_is_not_read_as_next_request(method, headers, status, idle_service):
    """RFC 9112, section 6.3: a proxy may forward such a request with another end (request smuggling)."""
    header = f"{method} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}\r\n\r\n"
    with connect(idle_service) as connection:
        connection.sendall(header.encode() + b"0\r\n\r\n" + HEALTH)
        assert re.findall(rb"HTTP/1.1 (\d+) ", receive_all(connection)) == [status]


@pytest.mark.parametrize("separate", [True, False])
def test_requests_are_batched_unless_separate_requests_is_set(separate):
    calls, started, go = [], threading.Event(), threading.Event()

    def call(inputs):
        calls.append(inputs)
        started.set()
        go.wait(60)
        return inputs

    batcher = Batcher(call, 4, 0, 16, 1, separate)
    jobs = batcher.submit(["first"])
    assert started.wait(60)  # the only worker is busy: the next two requests wait
    jobs += batcher.submit(["a", "b"]) + batcher.submit(["c", "d", "e", "f", "g"])
    go.set()
    assert [job.answer.result(60) for job in jobs] == ["first", *"abcdefg"]
    separated = [["first"], ["a", "b"], ["c", "d", "e", "f"], ["g"]]
    assert calls == (separated if separate else [["first"], [*"abcd"], [*"efg"]])
