"""serve.py answers what HTTP may bring, with an infer.py that does what its texts say."""

import http.client
import json
import math
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

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
    (folder / "infer.json").write_text('{"task": "translation", "threads": null}')
    return folder


@contextmanager
def serving(folder, *words, ready=True, **environment):
    with run_service(
        "serve.py", "--port", "0", "--workers", "1", *words,
        folder=write(folder), environment=environment, ready=ready,
    ) as found:  # fmt: skip
        yield found


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("stub"), MAX_BODY="100000", MAX_WAITING="8") as found:
        yield found


def let_wait(service, folder, pool):
    """Let the only worker wait for the file `go`; return the answer to come."""
    for name in ("go", "called"):
        (folder / name).unlink(missing_ok=True)
    found = pool.submit(service.predict, "wait")
    end = time.monotonic() + 60
    while not (folder / "called").exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


@contextmanager
def waiting(service, folder, *texts):
    """Let the only worker wait, and a request of each of `texts` behind it; yield their answers to come."""
    with ThreadPoolExecutor(len(texts) + 1) as pool:
        first = let_wait(service, folder, pool)
        found = []
        for number, text in enumerate(texts, 1):
            found.append(pool.submit(service.predict, text))
            service.wait_until("smelt_inputs_waiting", number)
        try:
            yield found
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
        ("POST", "/predict", JSON | {"Content-Length": "5", "content-length": "6"}, None, 400),
        ("POST", "/predict", JSON | {"Content-Length": "-5"}, None, 400),
        ("POST", "/predict", JSON | {"Transfer-Encoding": "chunked"}, None, 411),
        ("POST", "/predict", JSON | {"Transfer-Encoding": "chunked", "Content-Length": "0"}, None, 411),
        ("POST", "/nothing", JSON, '{"inputs": ["a"]}', 404),
        ("GET", "/../infer.py", {}, None, 404),
        ("GET", "/predict", {}, None, 405),
        ("PUT", "/predict", {}, "a", 405),
        ("POST", "/health", JSON, "{}", 405),
        ("BREW", "/predict", {}, None, 501),
        ("GET", "/" + "a" * 70_000, {}, None, 414),
        ("GET", "/health", {"X-Long": "a" * 70_000}, None, 431),
        ("GET", "/health", {f"X-{n}": "a" * 30_000 for n in range(3)}, None, 431),
        ("POST", "/predict", {"Content-Type": "multipart/form-data; boundary=x"}, "--x--", 415),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_said_by_its_status(service, method, path, headers, body, status):
    found, headers_received, answer = service.request(method, path, body, headers)
    assert found == status
    assert headers_received["Content-Type"] == "application/json"
    assert json.loads(answer).keys() == {"error"}
    assert b"Traceback" not in answer
    assert ("Allow" in headers_received) is (status == 405)
    assert service.predict("a man") == (200, ["a man|1"])


def test_texts_of_every_script_come_and_go_as_utf_8(service):
    texts = ["\u732b\u306f\u53ef\u611b\u3044", "\U0001f680 \u00e9", "", "a\nb\t\x00"]
    answer = [f"{text}|4" for text in texts]
    assert service.predict(*texts) == (200, answer)
    body = json.dumps({"inputs": texts})  # in ASCII, with escapes
    found = service.request("POST", "/predict", body, {"Content-Type": "Application/JSON; charset=utf-8"})[2]
    assert json.loads(found.decode()) == {"outputs": answer}
    assert "\u732b" in found.decode()
    assert service.predict() == (200, [])


def test_what_no_http_is_gets_an_answer_in_words(service):
    tls = b"\x16\x03\x01\x02\x00\x01\n"
    for sent in (b"hello\r\n\r\n", tls, b"GET / HTTP/9.9\r\n\r\n", b"A B C D\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as line:
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda line=line: line.recv(4096), b""))
        assert re.match(rb"HTTP/1.1 (400|505) ", answer)
        assert b"Traceback" not in answer


@pytest.mark.parametrize(
    "line",
    ["no header", "Name : a", ": a", "X: a\r\r", "X: a\rY: b", " folded", "X: \0", "Content-Length : {}"],
)
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_no_body_is_the_next_request_whatever_stands_among_the_headers(service, line, end):
    body = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    request_lines = [
        "POST /nothing HTTP/1.1",
        "Host: x",
        line.format(len(body)),
        f"Content-Length: {len(body)}",
        "",
        body,
    ]
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as sender:
        sender.sendall(end.join(request_lines).encode())
        sender.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionError):  # what was not read of it
            while part := sender.recv(4096):
                answer += part
    assert re.findall(rb"HTTP/1.1 (\d+) ", answer) == [b"400"]


def test_a_head_that_ends_too_soon_is_no_request(service):
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        line.shutdown(socket.SHUT_WR)
        assert line.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_json_of_any_depth_is_refused_as_what_it_is(service):
    for depth in range(900, 1000):  # around the limit of Python
        body = "[" * depth + "]" * depth
        for sent in (body, f'{{"inputs": [{body}]}}'):
            assert service.request("POST", "/predict", sent, JSON)[0] in (400, 422)


def test_a_connection_serves_many_requests_also_behind_a_refused_one(service):
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
def test_a_body_that_is_announced_is_called_for_only_where_it_is_read(service, length, expected):
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as line:
        head = f"Content-Type: application/json\r\nContent-Length: {length}\r\nExpect: 100-continue"
        line.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        assert line.recv(4096).startswith(expected)
        if length == 17:
            line.sendall(b'{"inputs": ["a"]}')
            assert line.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_ends_too_soon_is_told(service):
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as line:
        head = "Content-Type: application/json\r\nContent-Length: 50"
        line.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + b'{"inputs"')
        line.shutdown(socket.SHUT_WR)
        assert line.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_requests_that_wait_share_a_call_and_one_that_fails_fails_no_other(tmp_path):
    with serving(tmp_path) as service:
        with waiting(service, tmp_path, "a", "b", "c") as found:
            pass
        assert [one.result() for one in found] == [(200, [f"{text}|3"]) for text in "abc"]
        with waiting(service, tmp_path, "a", "bad", "c") as found:
            pass
        answers = [one.result() for one in found]
        assert [answers[0], answers[2]] == [(200, ["a|1"]), (200, ["c|1"])]
        assert answers[1][0] == 500
        assert "secret" not in answers[1][1]
        assert service.metric("smelt_failures_total") == 2
        assert service.predict("a", "short")[0] == 500
        text = service.request("GET", "/metrics")[2].decode()
        assert 'smelt_requests_total{path="/predict",status="500"} 2' in text
        # the first call, three, of which none is done again, one alone, three alone, two, two alone
        assert service.metric("smelt_inputs_total") == 1 + 3 + 1 + 2


def test_a_batch_has_no_more_than_was_said(tmp_path):
    with serving(tmp_path, "--max-batch", "2") as service:
        with waiting(service, tmp_path, "a", "b", "c") as found:
            pass
        assert [one.result()[1] for one in found] == [["a|2"], ["b|2"], ["c|1"]]


def test_where_too_many_wait_the_next_is_told_to_come_again(tmp_path):
    with serving(tmp_path, MAX_WAITING="2") as service, waiting(service, tmp_path, "a", "b") as found:
        status, headers, body = service.request("POST", "/predict", '{"inputs": ["c"]}', JSON)
        assert (status, int(headers["Retry-After"]) > 0) == (503, True)
        assert json.loads(body)["error"]
        assert service.request("GET", "/health")[0] == 200
    assert [one.result()[0] for one in found] == [200, 200]


def test_who_waited_too_long_is_told_and_not_computed(tmp_path):
    with serving(tmp_path, "--timeout", "1") as service:
        with ThreadPoolExecutor() as pool:
            first = let_wait(service, tmp_path, pool)
            assert first.result()[0] == 503
            assert service.predict("a")[0] == 503
        (tmp_path / "go").touch()
        service.wait_until("smelt_inputs_waiting", 0)
        service.wait_until("smelt_batch_size_count", 1)
        assert service.metric("smelt_batch_size_sum") == 1


def test_health_says_when_the_model_is_loaded(tmp_path):
    (tmp_path / "slow").touch()
    with serving(tmp_path, ready=False) as service:
        check = [sys.executable, "serve.py", "--port", str(service.port), "--health"]
        for path in ("/health", "/predict"):
            status, headers, _ = service.request("POST" if path == "/predict" else "GET", path, "{}", JSON)
            assert (status, "Retry-After" in headers) == (503, True)
        assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 1
        assert service.metric("smelt_ready") == 0
        assert not (tmp_path / "first").exists()
        (tmp_path / "load").touch()
        service.wait_until("smelt_ready", 1)
        assert (tmp_path / "first").exists()  # a call was made, since the first one is the slowest
        assert service.request("GET", "/health")[0] == 200
        assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 0
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 1


def test_a_model_that_cannot_be_loaded_ends_the_service(tmp_path):
    write(tmp_path)
    (tmp_path / "broken").touch()
    with serving(tmp_path, ready=False) as service:
        assert service.process.wait(60) == 1
        assert "a graph is damaged" in service.process.stderr.read()


def test_at_sigterm_requests_on_their_way_are_answered_and_no_others(tmp_path):
    with serving(tmp_path, "--grace", "60") as service:
        kept = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        kept.request("GET", "/health")
        kept.getresponse().read()
        with ThreadPoolExecutor() as pool:
            found = let_wait(service, tmp_path, pool)
            service.process.terminate()
            for _ in range(10_000):  # the signal is on its way
                kept.request("GET", "/health")
                answer = kept.getresponse()
                if answer.status != 200:
                    break
                answer.read()
            assert (answer.status, answer.will_close) == (503, True)
            with suppress(OSError):  # until it is refused, or closed while it is accepted
                for _ in range(10_000):
                    service.request("GET", "/health")
            with pytest.raises(subprocess.TimeoutExpired):
                service.process.wait(0.5)
            (tmp_path / "go").touch()
            assert found.result() == (200, ["wait|1"])
        assert service.process.wait(60) == 0


def test_at_sigterm_nobody_is_waited_for_longer_than_was_said(tmp_path):
    with serving(tmp_path, "--grace", "0") as service, ThreadPoolExecutor() as pool:
        found = let_wait(service, tmp_path, pool)
        service.process.terminate()
        assert service.process.wait(60) == 0
        assert isinstance(found.exception(), OSError)


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["--port", "x"], {}), (["--port", "70000"], {}), (["--max-batch", "0"], {}), (["--nothing"], {}),
        ([], {"WORKERS": "-1"}), ([], {"MAX_WAIT": "nan"}), (["--host", "256.1.1.1"], {}),
    ],
)  # fmt: skip
def test_options_that_are_wrong_end_it_with_a_message(tmp_path, words, environment):
    done = subprocess.run(
        [sys.executable, "serve.py", *words],
        cwd=write(tmp_path), env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_told(service, tmp_path):
    done = subprocess.run(
        [sys.executable, "serve.py", "--port", str(service.port)],
        cwd=write(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


# https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
NAME, VALUE = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r"(?:[0-9.]+(?:e[-+]?\d+)?|\+Inf|NaN)"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? ({VALUE})")


def test_metrics_are_in_the_format_of_prometheus(service):
    service.predict("a", "b")
    status, headers, body = service.request("GET", "/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    kinds, samples, last = {}, {}, ""
    lines = body.decode().split("\n")
    assert lines.pop() == ""
    for line in lines:
        if line.startswith("# "):
            word, name, rest = re.fullmatch(rf"# (HELP|TYPE) ({NAME}) (.+)", line).groups()
            assert (word == "HELP") is (name != last)  # help, type, samples, and the next
            kinds, last = kinds | ({name: rest} if word == "TYPE" else {}), name
            continue
        name, labels, value = SAMPLE.fullmatch(line).groups()
        assert re.fullmatch(rf"{last}(_bucket|_sum|_count)?", name)
        assert (name, labels) not in samples
        samples[name, labels] = float(value)
    assert set(kinds.values()) == {"counter", "gauge", "histogram"}
    assert all(name.endswith("_total") is (kind == "counter") for name, kind in kinds.items())
    for name in (name for name, kind in kinds.items() if kind == "histogram"):
        found = [(labels[4:-1], value) for (n, labels), value in samples.items() if n == f"{name}_bucket"]
        ends, counts = [float(end) for end, _ in found], [value for _, value in found]
        assert (ends, counts) == (sorted(ends), sorted(counts))
        assert (ends[-1], counts[-1]) == (math.inf, samples[f"{name}_count", None])
        assert samples[f"{name}_sum", None] > 0
    assert samples["smelt_inputs_cut_total", None] == 7
