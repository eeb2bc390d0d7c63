"""What bounds the connections of a service, in this process."""

import http.client
import socket
import threading
from argparse import Namespace
from contextlib import contextmanager

import pytest

from smelt.export.package.standalone.parts import http_requests
from smelt.export.package.standalone.parts.batcher import Batcher
from smelt.export.package.standalone.parts.http_requests import Handler, Service


class Model:
    task, cut = "translation", 0

    def read(self, value):
        return value

    def answer(self, inputs):
        return inputs


@contextmanager
def serving():
    options = Namespace(
        host="127.0.0.1", port=0, workers=1, task="translation", max_body=1000, max_waiting=8, timeout=60
    )
    service = Service(options)
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


def test_of_too_many_connections_the_next_is_told_to_come_again(monkeypatch):
    monkeypatch.setattr(http_requests, "MOST_CONNECTIONS", 1)
    with serving() as service:
        first, answer = asked(service)
        assert answer.status == 200
        second, answer = asked(service)
        assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
        second.close()
        first.close()
        while (found := asked(service))[1].status == 503:  # until the first one's thread has ended
            found[0].close()
        found[0].close()


@pytest.mark.parametrize("limit", ["BODY_S", "timeout"])
def test_a_body_that_does_not_come_is_not_waited_for_for_ever(limit, monkeypatch):
    if limit == "timeout":
        monkeypatch.setattr(Handler, "timeout", 0.05)
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
    monkeypatch.setattr(Handler, "timeout", 0.05)
    with (
        serving() as service,
        socket.create_connection(("127.0.0.1", service.server_port), timeout=60) as line,
    ):
        assert line.recv(4096) == b""
