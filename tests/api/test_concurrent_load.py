"""`smelt bench --callers`: concurrent requests in process and over the service of a package."""

import json
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from smelt.api.concurrent_load import load_table, send_requests, service_caller
from smelt.core.errors import InputError, RunError
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.graphs import exported_artifacts
from tests.support.graphs.standalone_packages import standalone_package

QUICK = ("--rounds", 3, "--requests", 4, "--texts", 3, "--threads", 1)


def measured(result):
    content = json.loads(result.stdout)
    return content, [artifact["load"] for artifact in content["artifacts"].values()]


@pytest.mark.parametrize("http", [False, True])
def test_each_number_of_callers_has_a_row(http):
    folder = standalone_package("classifier") if http else exported_artifacts.exported_artifact("classifier")
    flags = ["--http"] if http else []
    result = harness.smelt("bench", folder, "--callers", 1, "--callers", 6, *QUICK, *flags, "--json")
    assert result.exit_code == 0, result.output
    content, (rows,) = measured(result)
    assert [row["callers"] for row in rows] == [1, 6]
    assert [row["requests"] for row in rows] == [3 * 4, 3 * 4 * 6]  # at least four for each caller
    for row in rows:
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert row["throughput_range"][0] <= row["throughput"] <= row["throughput_range"][1]
    assert content["settings"]["http"] == http
    table = load_table(content)
    assert max(map(len, table.splitlines())) <= 80
    assert len([line for line in table.splitlines() if line.startswith(folder.name[:24])]) == 2


def test_service_that_does_not_start_is_an_error_of_its_artifact(tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(standalone_package("classifier"), broken)
    (broken / "infer.py").write_text("raise ValueError('damaged')\n")
    folders = (standalone_package("classifier"), broken)
    result = harness.smelt("bench", *folders, "--callers", 1, *QUICK, "--http", "--json")
    assert result.exit_code == 1, result.output
    content, (rows, broken_rows) = measured(result)
    assert (len(rows), broken_rows) == (1, [])
    assert content["artifacts"]["broken"]["error"]["code"] == "service-failed"
    assert "damaged" in content["artifacts"]["broken"]["error"]["message"]
    assert "damaged" in load_table(content)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--http",), "unused-setting"),
        (("--requests", 5), "unused-setting"),
        (("--callers", 1, "--batch-size", 2), "unused-setting"),
        (("--callers", 1, "--http"), "not-a-package"),
        (("--callers", 1, "--http", "--max-new-tokens", 3), "unused-setting"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, code):
    artifact = exported_artifacts.exported_artifact("classifier")
    assert command_error(harness.smelt("bench", artifact, *arguments, code=2)).code == code


def test_option_that_needs_callers_names_both_remedies():
    artifact = exported_artifacts.exported_artifact("classifier")
    message = str(command_error(harness.smelt("bench", artifact, "--http", code=2)))
    assert all(value in message for value in ("--callers N", "remove --http"))


@contextmanager
def responding(status):
    """Run a service that answers each request with `status`; yield its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.quick
@pytest.mark.parametrize(("status", "code"), [(503, "service-busy"), (422, "service-failed")])
def test_rejected_request_is_an_error_by_code(status, code):
    with responding(status) as port, service_caller(port) as call, raises_code(code, RunError):
        call("text")


@pytest.mark.quick
def test_accepted_requests_are_no_errors():
    with responding(200) as port, service_caller(port) as call:
        call("text")


@pytest.mark.quick
def test_closed_service_is_an_error_by_code():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with service_caller(port) as call, raises_code("service-closed", RunError):
        call("text")


@pytest.mark.quick
def test_first_error_of_a_caller_ends_all_requests():
    """The third request fails; the other caller, which needs 1 s for all, ends with its current one."""
    sent = []

    @contextmanager
    def target():
        def call(text):
            sent.append(text)
            if len(sent) == 3:
                raise InputError("no", code="test-error")
            time.sleep(0.01)

        yield call

    with raises_code("test-error", InputError):
        send_requests(target, ["a"], 100, 2)
    assert len(sent) < 10


@pytest.mark.quick
def test_caller_that_cannot_be_opened_is_an_error_of_all():
    opened = iter(range(3))

    @contextmanager
    def target():
        if next(opened) == 1:
            raise InputError("no", code="test-error")
        yield lambda text: None

    with raises_code("test-error", InputError):  # and does not wait for the others forever
        send_requests(target, ["a"], 12, 3)


@pytest.mark.quick
def test_texts_repeat_and_callers_work_at_the_same_time():
    barrier, sent = threading.Barrier(4, timeout=30), []

    @contextmanager
    def target():
        def call(text):
            sent.append(text)
            barrier.wait()  # passes only if four requests are in flight

        yield call

    latencies_ms, seconds = send_requests(target, ["a", "b"], 8, 4)
    assert sorted(sent) == ["a"] * 4 + ["b"] * 4
    assert len(latencies_ms) == 8
    assert seconds > 0
