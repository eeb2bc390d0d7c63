"""What bounds the connections of a service, in this process."""

import http.client
import math
import socket
import threading
import time
from argparse import Namespace
from contextlib import contextmanager

import pytest

from smelt.export.package.standalone import http_requests
from smelt.export.package.standalone.http_requests import InferenceServer, RequestHandler
from smelt.export.package.standalone.packaged_model import Batcher

JSON = {"Content-Type": "application/json"}


class Model:
    task, cut = "translation", 0

    def read(self, value):
        return value

    def answer(self, inputs):
        return inputs


@contextmanager
def serving():
    options = Namespace(
        host="127.0.0.1", port=0, workers=1, task="translation", max_body=1000, max_bodies=1000,
        max_waiting=8, timeout=60,
    )  # fmt: skip
    service = InferenceServer(options)
    service.model = Model()
    service.batcher = Batcher(service.call, 4, 0, 8, 1)
    loop = threading.Thread(target=service.serve_forever, args=(0.01,))
    loop.start()
    try:
        yield service
    finally:
        service.shutdown()
        service.server_close()
        loop.join()


def asked(service):
    connection = http.client.HTTPConnection("127.0.0.1", service.server_port, timeout=60)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    return connection, answer


@contextmanager
def sending(service, body=b"", length=14):
    """A connection that has sent a part of a body, which is being read."""
    with socket.create_connection(("127.0.0.1", service.server_port), timeout=60) as line:
        head = f"Content-Type: application/json\r\nContent-Length: {length}"
        line.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
        wait_for(lambda: (service.busy, service.held) == (1, len(body)))
        yield line


def wait_for(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_of_too_many_connections_the_next_is_told_to_come_again_and_health_answers(monkeypatch):
    monkeypatch.setattr(http_requests, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(http_requests, "DRAIN_S", 60)
    with serving() as service, sending(service) as first:
        connection, answer = asked(service)
        assert answer.status == 200
        # a client that sends more than the buffers of sockets hold reads its answer only when all is sent
        connection.request("POST", "/predict", b" " * 16_000_000, JSON)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
        answer.read()
        connection.close()
        wait_for(lambda: len(service.waiting) == 1)
        monkeypatch.setattr(http_requests, "SPARE_CONNECTIONS", 0)
        connection, answer = asked(service)
        assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
        connection.close()
        first.sendall(b'{"inputs": []}')
        assert first.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_request_closes_idle_connections_where_too_many_are_open(monkeypatch):
    monkeypatch.setattr(http_requests, "MAX_CONNECTIONS", 1)
    with serving() as service:
        idle = [asked(service)[0] for _ in range(3)]
        wait_for(lambda: max(service.waiting.values()) < math.inf)
        connection, _ = asked(service)
        connection.request("POST", "/predict", b'{"inputs": []}', JSON)
        assert connection.getresponse().status == 200
        assert [one.sock.recv(4096) for one in idle] == [b""] * 3
        for one in (connection, *idle):
            one.close()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX: a"])
def test_a_connection_that_waits_for_its_request_makes_room_for_the_next(sent, monkeypatch):
    monkeypatch.setattr(http_requests, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(http_requests, "SPARE_CONNECTIONS", 0)
    with serving() as service:
        kept, answer = asked(service)
        kept.sock.sendall(sent)
        for _ in range(3):
            wait_for(lambda: max(service.waiting.values()) < math.inf)  # it asks no more
            other, answer = asked(service)
            assert answer.status == 200
            assert kept.sock.recv(4096) == b""
            kept.close()
            kept = other
        kept.close()


def test_a_head_that_comes_byte_by_byte_has_an_end(monkeypatch):
    monkeypatch.setattr(RequestHandler, "timeout", 600)  # it is not the pause between two bytes that ends it
    with serving() as service:
        line, _ = asked(service)
        line.sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
        monkeypatch.setattr(http_requests, "HEAD_S", 0)
        assert line.sock.recv(4096) == b""
        line.close()
        wait_for(lambda: not service.waiting)


def test_what_is_read_of_all_bodies_is_bounded():
    with serving() as service, sending(service, b" " * 600, 1000) as first:
        line = http.client.HTTPConnection("127.0.0.1", service.server_port, timeout=60)
        for count, status in ((500, 503), (300, 200), (300, 200)):
            line.request("POST", "/predict", b'{"inputs": []}'.ljust(count), JSON)
            answer = line.getresponse()
            assert answer.status == status
            answer.read()
            wait_for(lambda: service.held == 600)  # released after the answer
        line.close()
        first.sendall(b'{"inputs": []}'.ljust(400))
        assert first.recv(4096).startswith(b"HTTP/1.1 200 ")
        wait_for(lambda: not service.held)


@pytest.mark.parametrize("limit", ["BODY_S", "timeout"])
def test_a_body_that_does_not_come_is_not_waited_for_for_ever(limit, monkeypatch):
    if limit == "timeout":
        monkeypatch.setattr(RequestHandler, "timeout", 0.05)
    else:
        monkeypatch.setattr(http_requests, "BODY_S", 0)
    monkeypatch.setattr(http_requests, "DRAIN_S", 0.01)
    with serving() as service:
        with socket.create_connection(("127.0.0.1", service.server_port), timeout=60) as line:
            # all of it is there, too late; or a part, and nothing comes
            body = b'{"inputs": []}' if limit == "BODY_S" else b'{"inputs"'
            head = "Content-Type: application/json\r\nContent-Length: 14"
            line.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
            assert line.recv(4096).startswith(b"HTTP/1.1 408 ")
        connection, answer = asked(service)
        assert answer.status == 200
        connection.close()


def test_a_connection_that_asks_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(RequestHandler, "timeout", 0.05)
    with (
        serving() as service,
        socket.create_connection(("127.0.0.1", service.server_port), timeout=60) as line,
    ):
        assert line.recv(4096) == b""


def test_too_many_inputs_are_refused_before_one_is_read(monkeypatch):
    monkeypatch.setattr(Model, "read", lambda self, value: pytest.fail("an input was read"))
    with serving() as service:
        line = http.client.HTTPConnection("127.0.0.1", service.server_port, timeout=60)
        line.request("POST", "/predict", b'{"inputs": [1,2,3,4,5,6,7,8,9]}', JSON)
        assert line.getresponse().status == 422
        line.close()


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        ("1.1", [], 400),
        ("1.1", ["a"], 200),
        ("1.1", ["a", "a"], 400),
        ("1.0", [], 200),
        ("1.0", ["a", "b"], 400),
    ],
)
def test_request_needs_exactly_one_host(version, hosts, status):
    """RFC 9112, section 3.2: a proxy may take another one of two hosts."""
    headers = "".join(f"Host: {host}\r\n" for host in hosts)
    with (
        serving() as service,
        socket.create_connection(("127.0.0.1", service.server_port), timeout=60) as line,
    ):
        line.sendall(f"GET /health HTTP/{version}\r\n{headers}\r\n".encode())
        assert line.recv(4096).startswith(f"HTTP/1.1 {status} ".encode())


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
