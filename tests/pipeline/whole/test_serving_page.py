"""The service of docs/serving.md, run as it stands there."""

import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import exported
import pytest
import tiny
from served import served

import smelt

PAGE = Path(__file__).resolve().parents[3] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def artifact():
    return exported.artifact("translator")


@contextmanager
def serving(artifact, home, before=""):
    """Run the page's service, behind the lines `before`; yield its address."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    script = home / "serve.py"
    script.write_text(before + code)
    with served(str(script), str(artifact), "0", "2") as found:  # 0: any port that is free
        yield found


@pytest.fixture(scope="module")
def address(artifact, tmp_path_factory):
    with serving(artifact, tmp_path_factory.mktemp("s")) as found:
        yield found


def ask(address, body):
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data=body), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_many_requests_at_once_get_what_they_would_get_alone(address, artifact):
    requests = [[tiny.SENTENCES[i % len(tiny.SENTENCES)]] * (1 + i % 2) for i in range(60)]
    with smelt.load(artifact, threads=1) as model:
        expected = [(200, model.generate(texts, max_new_tokens=64)) for texts in requests]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda texts: ask(address, json.dumps(texts).encode()), requests)) == expected


COUNTING = """
import time
import smelt.use.loaded

inside = []

def generate(self, texts, **_):
    inside.append(texts)
    count = len(inside)
    time.sleep(0.1)
    inside.pop()
    return [count]

smelt.use.loaded.Model.generate = generate
"""


def test_calls_at_the_same_time_are_as_many_as_cores_were_said(artifact, tmp_path):
    with serving(artifact, tmp_path, COUNTING) as address, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(address, b'["a"]'), range(16)))
    assert {status for status, _ in answers} == {200}
    assert {count for _, [count] in answers} <= {1, 2}
    assert (200, [2]) in answers


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'"a man"', "expected a list of texts, read one text"),
        (b"[3]", "texts[0]: expected a text, read 3 (int)"),
        (b"null", "expected a list of texts, read None"),
        (b"{", "Expecting property name"),
        (b"\xff", "utf-8"),
    ],
)
def test_what_is_no_list_of_texts_is_answered_with_the_reason(address, body, message):
    status, answer = ask(address, body)
    assert status == 400
    assert message in answer["error"]
    assert ask(address, b'["a man"]')[0] == 200
