"""Services, each in a process of its own: serve.py of a package, and what a Dockerfile says."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# what a container does not have
MISSING_PACKAGES = ("smelt", "torch", "transformers", "onnx", "safetensors", "huggingface_hub", "pydantic")


@dataclass
class Service:
    """A service that runs. port: of this machine. process: it; text on its standard output."""

    port: int
    process: subprocess.Popen[str]

    def request(
        self, method: str, path: str, body: bytes | str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Return status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = body.encode() if isinstance(body, str) else body
            connection.request(method, path, sent, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def predict(self, *inputs: Any) -> tuple[int, Any]:
        """Return status and outputs, or the error, of inputs that are sent as JSON."""
        body = json.dumps({"inputs": inputs}, ensure_ascii=False)
        status, _, body_bytes = self.request("POST", "/predict", body, {"Content-Type": "application/json"})
        content = json.loads(body_bytes)
        return status, content["outputs"] if status == 200 else content["error"]

    def metric(self, name: str) -> float:
        """Return a metric that has no labels."""
        text = self.request("GET", "/metrics")[2].decode()
        return float(re.search(rf"^{name} (\S+)$", text, flags=re.M)[1])  # type: ignore[index]

    def wait_until(self, name: str, value: float) -> None:
        """Wait until a metric has this value."""
        end = time.monotonic() + 60
        while self.metric(name) != value:
            assert time.monotonic() < end, f"{name} is {self.metric(name)}"
            time.sleep(0.01)


def stop_and_read_stderr(process: subprocess.Popen[str]) -> str:
    """End a process that does not do what it should; return what it wrote to its standard error."""
    process.kill()
    return process.communicate()[1]


@contextmanager
def run_service(
    *words: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    ready: bool = True,
    python: str = sys.executable,
) -> Iterator[Service]:
    """Run Python with `words` in `folder`; yield the service as soon as it listens, and is `ready`."""
    with subprocess.Popen(
        [python, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **(environment or {})},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            match = re.fullmatch(r"listening on http://.*:(\d+)\n", line)
            assert match, line + stop_and_read_stderr(process)
            if ready:
                line = process.stdout.readline()
                assert line == "ready\n", line + stop_and_read_stderr(process)
            yield Service(int(match[1]), process)
        finally:
            process.kill()


@dataclass
class Dockerfile:
    """What a Dockerfile says of a container that runs; of one stage, with known instructions alone."""

    base: str = ""
    workdir: str = ""
    user: str = ""
    ports: list[int] = field(default_factory=list)
    copies: list[list[str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    check: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)


def read_dockerfile(path: Path) -> Dockerfile:
    """Read the Dockerfile `path`; another instruction than those of packages is an error."""
    dockerfile = Dockerfile()
    for line in path.read_text(encoding="utf-8").splitlines():
        instruction, rest = line.split(" ", 1)
        dockerfile.order.append(instruction)
        match instruction:
            case "FROM":
                dockerfile.base = rest
            case "WORKDIR":
                dockerfile.workdir = rest
            case "USER":
                dockerfile.user = rest
            case "EXPOSE":
                dockerfile.ports.append(int(rest))
            case "COPY":
                dockerfile.copies.append(rest.split())
            case "ENV":
                dockerfile.environment |= dict(assignment.split("=", 1) for assignment in shlex.split(rest))
            case "RUN":
                dockerfile.commands.append(rest)
            case "HEALTHCHECK":
                dockerfile.check = json.loads(rest[rest.index(" CMD ") + 5 :])
            case "CMD":
                dockerfile.start = json.loads(rest)
            case _:
                raise ValueError(f"{path}: {line}")
    return dockerfile


def copy_package(package: Path, root: Path) -> tuple[Path, Dockerfile]:
    """Copy what the Dockerfile of `package` copies, to where it says below `root`; return the work folder."""
    dockerfile = read_dockerfile(package / "Dockerfile")
    folder = root / dockerfile.workdir.lstrip("/")
    folder.mkdir(parents=True)
    for *sources, target in dockerfile.copies:
        for source in sources:
            if (package / source).is_dir():
                shutil.copytree(package / source, folder / target, dirs_exist_ok=True)
            else:
                shutil.copy(package / source, folder / target)
    blocked = root / "absent"
    blocked.mkdir()
    code = f"import sys\nsys.modules.update(dict.fromkeys({MISSING_PACKAGES!r}))\n"
    (blocked / "sitecustomize.py").write_text(code)
    return folder, dockerfile


@contextmanager
def container(package: Path, root: Path, **environment: str) -> Iterator[tuple[Service, Dockerfile, Path]]:
    """Run a package as its Dockerfile says, with `-e NAME=VALUE`, and at any port that is free."""
    folder, dockerfile = copy_package(package, root)
    assert dockerfile.start[0] == "python"
    variables = {**dockerfile.environment, "PORT": "0", "PYTHONPATH": str(root / "absent"), **environment}
    with run_service(*dockerfile.start[1:], folder=folder, environment=variables) as service:
        yield service, dockerfile, folder
