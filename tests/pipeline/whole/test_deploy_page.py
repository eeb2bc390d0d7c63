"""The service of docs/deploy.md, run as it stands there, beside a package."""

import json
import re
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import exported
import pytest
import tiny
from packaged import written
from served import served

import smelt

PAGE = Path(__file__).resolve().parents[3] / "docs" / "deploy.md"
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'smelt')))\n"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    [code] = [block for block in blocks if "http.server" in block]
    folder = tmp_path_factory.mktemp("service") / "p"
    shutil.copytree(written("translator"), folder)
    (folder / "serve.py").write_text(BLOCKED + code)
    with served("serve.py", "0", "2", folder=folder) as found:  # 0: any port that is free
        yield found


def ask(address, body):
    request = urllib.request.Request(address, data=body.encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_many_callers_get_what_smelt_says(address):
    with smelt.load(exported.artifact("translator"), threads=1) as model:
        alone = [model.generate([text], max_new_tokens=4) for text in tiny.SENTENCES]
    bodies = [json.dumps([text]) for text in tiny.SENTENCES] * 4
    with ThreadPoolExecutor(6) as callers:
        found = list(callers.map(lambda body: ask(address, body), bodies))
    assert found == alone * 4
    assert ask(address, "[]") == []


@pytest.mark.parametrize("body", ["[", '"a text"', "[1]", "3", '["\\ud800"]'])
def test_what_is_no_list_of_texts_is_refused(address, body):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(address, body)
    assert caught.value.code == 400
    assert json.loads(caught.value.read())["error"]
    assert len(ask(address, '["a man"]')) == 1
