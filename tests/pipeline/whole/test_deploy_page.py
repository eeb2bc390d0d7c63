"""What docs/how-to/deploy.md says of the service of a package: its commands, paths and options."""

import argparse
import json
import re
import subprocess
from pathlib import Path

import pytest

from smelt.export.package.standalone import serve
from smelt.export.package.standalone.http_service import PATHS
from tests.support.graphs.standalone_packages import standalone_package
from tests.support.models import images
from tests.support.processes.services import run_service

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "deploy.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^curl .*", PAGE, flags=re.M)


@pytest.mark.parametrize("kind", ["translator", "vit"])
def test_commands_of_page_work(kind, tmp_path):
    images.make_image(1).save(tmp_path / "photo.jpg")
    commands = [line for line in COMMANDS if ("photo.jpg" in line) == (kind == "vit")]
    with run_service("serve.py", "--port", "0", folder=standalone_package(kind)) as service:
        for line in commands:
            command = line.replace(":8000", f":{service.port}")
            done = subprocess.run(
                ["sh", "-c", f"{command} --fail"], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            if done.returncode in (2, 127):
                pytest.skip("no curl, or one that is older than --json")
            assert done.returncode == 0, done.stderr
            if "/predict" in line:
                assert len(json.loads(done.stdout)["outputs"]) >= 1
    assert len(commands) == (1 if kind == "vit" else 4)


def test_table_of_page_has_every_option_and_path(monkeypatch, tmp_path):
    (tmp_path / "infer.json").write_text('{"task": "translation", "class": "Translator"}')
    monkeypatch.setattr(serve, "MODEL_FOLDER", tmp_path)
    options_seen = []
    add = argparse.ArgumentParser.add_argument

    def spy(parser, *names, **more):
        options_seen.append((names[0], more.get("default")))
        return add(parser, *names, **more)

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", spy)
    serve.parse_options([])
    options = {name: default for name, default in options_seen if name != "-h"}
    rows = dict(re.findall(r"^\|`(--[\w-]+)`, `\w+`\|([^|;]+)(?:;[^|]*)?\|", PAGE, flags=re.M))
    assert rows.keys() == options.keys()
    fields = {name: value for name, value in rows.items() if name not in ("--threads", "--workers")}
    large = {name: f"{int(options[name]) / 2**20:g} MiB" for name in ("--max-body", "--max-bodies")}
    assert fields == {name: options[name] for name in fields} | large
    for name in options:
        assert f"`{name}`, `{name[2:].upper().replace('-', '_')}`" in PAGE
    endpoints = re.findall(r"^\|`(GET|POST) (/\w*)`\|", PAGE, flags=re.M)
    assert {path: method for method, path in endpoints} == PATHS
