"""serve.py in a process, with an infer.py that does what its inputs ask for."""

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from smelt.export.package.standalone import serve
from smelt.export.package.standalone_format import assemble_script
from tests.support.processes.services import run_service

JSON = {"Content-Type": "application/json"}
# Each answer says how many texts its call had. A call with "wait" in it waits for the file `go`.
INFER = """
import time
from pathlib import Path

class Translator:
    def __init__(self, folder, threads):
        self.folder, self.cut = Path(folder), 7
        if (self.folder / "broken").exists():
            raise ValueError("a graph is damaged")
        self.wait("load") if (self.folder / "slow").exists() else None

    def wait(self, name):
        while not (self.folder / name).exists():
            time.sleep(0.005)

    def __call__(self, texts, batch_size):
        (self.folder / "first").touch()
        if "wait" in texts:
            (self.folder / "called").touch()
            self.wait("go")
        if "bad" in texts:
            raise ValueError("the secret of /etc")
        if "short" in texts:
            return []
        return [f"{text}|{len(texts)}" for text in texts]
"""


def write(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serve.py").write_text(assemble_script("serve", {}))
    (folder / "infer.py").write_text(INFER)
    (folder / "infer.json").write_text('{"task": "translation", "class": "Translator", "threads": null}')
    return folder


@contextmanager
def serving(folder, *words, ready=True, **environment):
    with run_service(
        "serve.py", "--port", "0", "--workers", "1", *words,
        folder=write(folder), environment=environment, ready=ready,
    ) as running_service:  # fmt: skip
        yield running_service


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("stub"), MAX_BODY="100000", MAX_WAITING="8") as running_service:
        yield running_service


def let_wait(service, folder, pool):
    """Let the only worker wait for the file `go`; return the answer to come."""
    for name in ("go", "called"):
        (folder / name).unlink(missing_ok=True)
    future = pool.submit(service.predict, "wait")
    end = time.monotonic() + 60
    while not (folder / "called").exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    return future


@contextmanager
def waiting(service, folder, *texts):
    """Let the only worker wait, and a request of each of `texts` behind it; yield their answers to come."""
    with ThreadPoolExecutor(len(texts) + 1) as pool:
        first = let_wait(service, folder, pool)
        futures = []
        for count, text in enumerate(texts, 1):
            futures.append(pool.submit(service.predict, text))
            service.wait_until("smelt_inputs_waiting", count)
        try:
            yield futures
        finally:
            (folder / "go").touch()
        assert first.result() == (200, ["wait|1"])


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", "/predict", JSON, '{"inputs": ["a"', 400),
        ("POST", "/predict", JSON, b'{"inputs": ["\xff"]}', 400),
        ("POST", "/predict", JSON, "[" * 90_000, 400),
        ("POST", "/predict", JSON, "", 400),
        ("POST", "/predict", JSON, '["a"]', 422),
        ("POST", "/predict", JSON, '{"inputs": "a"}', 422),
        ("POST", "/predict", JSON, '{"inputs": ["a"], "num_beams": 4}', 422),
        ("POST", "/predict", JSON, '{"inputs": [1]}', 422),
        ("POST", "/predict", JSON, '{"inputs": [["a", "b"]]}', 422),
        ("POST", "/predict", JSON, '{"inputs": ["\\ud800"]}', 422),
        ("POST", "/predict", JSON, '{"inputs": ["a"%s]}' % (', "a"' * 8), 422),
        ("POST", "/predict", {"Content-Type": "text/plain"}, "a", 415),
        ("POST", "/predict", {}, "a", 415),
        ("POST", "/predict", JSON | {"Content-Encoding": "gzip"}, "a", 415),
        ("POST", "/predict", {"Content-Type": "image/png"}, "a", 415),
        ("POST", "/predict", JSON, "a" * 100_001, 413),
        ("POST", "/predict", JSON | {"Transfer-Encoding": "chunked"}, None, 411),
        ("POST", "/nothing", JSON, '{"inputs": ["a"]}', 404),
        ("GET", "/../infer.py", {}, None, 404),
        ("GET", "/predict", {}, None, 405),
        ("PUT", "/predict", {}, "a", 405),
        ("POST", "/health", JSON, "{}", 405),
        ("BREW", "/predict", {}, None, 405),
        ("POST", "/predict", {"Content-Type": "multipart/form-data; boundary=x"}, "--x--", 415),
    ],
)  # fmt: skip
def test_invalid_request_returns_its_status_and_error(service, method, path, headers, body, status):
    response_status, headers_received, answer = service.request(method, path, body, headers)
    assert response_status == status
    assert headers_received["Content-Type"] == "application/json"
    assert json.loads(answer).keys() == {"error"}
    assert b"Traceback" not in answer
    assert ("Allow" in headers_received) is (status == 405)
    assert service.predict("a man") == (200, ["a man|1"])


def test_texts_of_every_script_are_utf_8(service):
    texts = ["\u732b\u306f\u53ef\u611b\u3044", "\U0001f680 \u00e9", "", "a\nb\t\x00"]
    answer = [f"{text}|4" for text in texts]
    assert service.predict(*texts) == (200, answer)
    body = json.dumps({"inputs": texts})  # in ASCII, with escapes
    response = service.request("POST", "/predict", body, {"Content-Type": "Application/JSON; charset=utf-8"})[
        2
    ]
    assert json.loads(response.decode()) == {"outputs": answer}
    assert "\u732b" in response.decode()
    assert service.predict() == (200, [])


def test_nested_json_returns_400_or_422(service):
    for depth in (100, 900, 990):  # the last is near the limit of Python
        body = "[" * depth + "]" * depth
        for sent in (body, f'{{"inputs": [{body}]}}'):
            assert service.request("POST", "/predict", sent, JSON)[0] in (400, 422)


def test_connection_is_kept_after_valid_and_refused_requests(service):
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    body = '{"inputs": ["a"]}'
    for sent, status in ((body, 200), ('{"inputs": 1}', 422), (body, 200)):
        connection.request("POST", "/predict", sent, JSON)
        answer = connection.getresponse()
        assert (answer.status, answer.will_close) == (status, False)
        answer.read()
    connection.request("HEAD", "/health")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"")
    connection.close()


@pytest.mark.parametrize(("length", "expected"), [(17, b"HTTP/1.1 100 "), (100_001, b"HTTP/1.1 413 ")])
def test_100_continue_is_sent_only_if_the_body_is_read(service, length, expected):
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as line:
        head = f"Content-Type: application/json\r\nContent-Length: {length}\r\nExpect: 100-continue"
        line.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        assert line.recv(4096).startswith(expected)
        if length == 17:
            line.sendall(b'{"inputs": ["a"]}')
            assert line.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_waiting_requests_share_a_call_and_a_failing_input_fails_alone(tmp_path):
    with serving(tmp_path) as service:
        with waiting(service, tmp_path, "a", "b", "c") as futures:
            pass
        assert [future.result() for future in futures] == [(200, [f"{text}|3"]) for text in "abc"]
        with waiting(service, tmp_path, "a", "bad", "c") as futures:
            pass
        answers = [future.result() for future in futures]
        assert [answers[0], answers[2]] == [(200, ["a|1"]), (200, ["c|1"])]
        assert answers[1][0] == 500
        assert "secret" not in answers[1][1]
        assert service.metric("smelt_failures_total") == 2
        assert service.predict("a", "short")[0] == 500
        text = service.request("GET", "/metrics")[2].decode()
        assert 'smelt_requests_total{path="/predict",status="500"} 2' in text
        # the first call, three, of which none is done again, one alone, three alone, two, two alone
        assert service.metric("smelt_inputs_total") == 1 + 3 + 1 + 2


def test_batch_has_at_most_max_batch_inputs(tmp_path):
    with serving(tmp_path, "--max-batch", "2") as service:
        with waiting(service, tmp_path, "a", "b", "c") as futures:
            pass
        assert [future.result()[1] for future in futures] == [["a|2"], ["b|2"], ["c|1"]]


def test_request_above_max_waiting_returns_503(tmp_path):
    with serving(tmp_path, MAX_WAITING="2") as service, waiting(service, tmp_path, "a", "b") as futures:
        status, headers, body = service.request("POST", "/predict", '{"inputs": ["c"]}', JSON)
        assert (status, int(headers["Retry-After"]) > 0) == (503, True)
        assert json.loads(body)["error"]
        assert service.request("GET", "/health")[0] == 200
    assert [future.result()[0] for future in futures] == [200, 200]


def test_expired_request_returns_503_without_inference(tmp_path):
    with serving(tmp_path, "--timeout", "1") as service:
        with ThreadPoolExecutor() as pool:
            first = let_wait(service, tmp_path, pool)
            assert first.result()[0] == 503
            assert service.predict("a")[0] == 503
        (tmp_path / "go").touch()
        service.wait_until("smelt_inputs_waiting", 0)
        service.wait_until("smelt_batch_size_count", 1)
        assert service.metric("smelt_batch_size_sum") == 1


def test_health_returns_503_until_model_is_loaded_and_called(tmp_path):
    (tmp_path / "slow").touch()
    with serving(tmp_path, ready=False) as service:
        for path in ("/health", "/predict"):
            status, headers, _ = service.request("POST" if path == "/predict" else "GET", path, "{}", JSON)
            assert (status, "Retry-After" in headers) == (503, True)
        assert service.metric("smelt_ready") == 0
        assert not (tmp_path / "first").exists()
        (tmp_path / "load").touch()
        service.wait_until("smelt_ready", 1)
        assert (tmp_path / "first").exists()  # a call was made, since the first one is the slowest
        assert service.request("GET", "/health")[0] == 200


def test_service_exits_if_model_cannot_be_loaded(tmp_path):
    write(tmp_path)
    (tmp_path / "broken").touch()
    with serving(tmp_path, ready=False) as service:
        assert service.process.wait(60) == 1
        assert "a graph is damaged" in service.process.stderr.read()


def test_sigterm_answers_requests_in_flight_and_closes_other_connections(tmp_path):
    with serving(tmp_path, "--grace", "60") as service:
        idle = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        idle.request("GET", "/health")
        idle.getresponse().read()
        with ThreadPoolExecutor() as pool:
            future = let_wait(service, tmp_path, pool)
            service.process.terminate()
            assert idle.sock.recv(4096) == b""
            with pytest.raises(OSError):  # noqa: PT011 (of several kinds)
                service.request("GET", "/health")
            with pytest.raises(subprocess.TimeoutExpired):
                service.process.wait(0.5)
            (tmp_path / "go").touch()
            assert future.result() == (200, ["wait|1"])
        assert service.process.wait(60) == 0
        idle.close()


def test_sigterm_waits_at_most_grace_seconds(tmp_path):
    with serving(tmp_path, "--grace", "0") as service, ThreadPoolExecutor() as pool:
        future = let_wait(service, tmp_path, pool)
        service.process.terminate()
        assert service.process.wait(60) == 0
        assert future.exception() is not None


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["--port", "x"], {}), (["--port", "70000"], {}), (["--max-batch", "0"], {}), (["--nothing"], {}),
        ([], {"WORKERS": "-1"}), ([], {"MAX_WAIT": "nan"}),
    ],
)  # fmt: skip
def test_invalid_options_exit_with_an_error(tmp_path, words, environment, monkeypatch, capsys):
    monkeypatch.setattr(serve, "MODEL_FOLDER", write(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as excinfo:
        serve.parse_options(words)
    assert excinfo.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "256.1.1.1"])
def test_used_or_invalid_address_exits_with_an_error(service, tmp_path, host):
    done = subprocess.run(
        [sys.executable, "serve.py", "--port", str(service.port), "--host", host],
        cwd=write(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_metrics_are_read_by_prometheus(service):
    service.predict("a", "b")
    status, headers, body = service.request("GET", "/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    metrics = {metric.name: metric for metric in text_string_to_metric_families(body.decode())}
    assert {(metric.name, metric.type) for metric in metrics.values()} == {
        ("smelt_requests", "counter"),
        ("smelt_request_seconds", "histogram"),
        ("smelt_inputs", "counter"),
        ("smelt_batch_size", "histogram"),
        ("smelt_batch_seconds", "histogram"),
        ("smelt_failures", "counter"),
        ("smelt_inputs_cut", "counter"),
        ("smelt_requests_in_flight", "gauge"),
        ("smelt_inputs_waiting", "gauge"),
        ("smelt_ready", "gauge"),
    }
    assert [sample.value for sample in metrics["smelt_inputs_cut"].samples] == [7]
    sums = [sample for sample in metrics["smelt_batch_seconds"].samples if sample.name.endswith("_sum")]
    assert sums[0].value > 0
    assert service.metric("smelt_requests_in_flight") == 1


@pytest.mark.parametrize(("words", "notes"), [
    ((), True), (("--separate-requests", "1"), False), (("--max-batch", "1"), False),
])  # fmt: skip
def test_service_notes_answers_that_depend_on_other_requests(tmp_path, monkeypatch, words, notes):
    monkeypatch.setattr(serve, "MODEL_FOLDER", tmp_path)
    for depends in (True, False):
        settings = {"task": "translation", "class": "Translator", "depends_on_batch": depends}
        (tmp_path / "infer.json").write_text(json.dumps(settings))
        assert serve.parse_options(list(words)).depends_on_requests is (depends and notes)
