"""A PostgreSQL server in a temporary folder, of Debian's package `postgresql`, on a Unix socket."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class PostgresServer:
    """A server. url: SQLAlchemy's, of its empty database."""

    def __init__(self, tools: Path, home: Path, identity: dict[str, str]) -> None:
        self._tools, self._home, self._identity = tools, home, identity
        self.url = f"postgresql+psycopg://smelt@/postgres?host={home}"

    def start(self) -> None:
        log = self._home / "server.log"
        with log.open("a") as out:
            self._process = subprocess.Popen(
                [
                    self._tools / "postgres", "-D", self._home / "data", "-k", self._home, "-F",
                    "-c", "listen_addresses=",
                ],
                stdout=out, stderr=out, cwd=self._home, **self._identity,
            )  # fmt: skip
        ready = [self._tools / "pg_isready", "-q", "-h", self._home]
        until = time.monotonic() + 60
        while subprocess.run(ready, check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > until:
                raise AssertionError(log.read_text())
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # ends open connections
        self._process.wait(timeout=60)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Start a server; skip the test without PostgreSQL."""
    pytest.importorskip("psycopg", reason="the extra 'postgresql' is not installed")
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs:
        pytest.skip("no /usr/lib/postgresql/*/bin/initdb: apt-get install postgresql")
    tools = programs[-1].parent
    # initdb refuses to run as root; a socket's path may have at most 107 characters, so not tmp_path
    identity = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    home = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        if identity:
            shutil.chown(home, **identity)
        initdb = subprocess.run(
            [tools / "initdb", "-D", home / "data", "-U", "smelt", "--auth=trust", "--no-sync"],
            capture_output=True, text=True, cwd=home, check=False, **identity,
        )  # fmt: skip
        assert initdb.returncode == 0, initdb.stderr
        server = PostgresServer(tools, home, identity)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)
