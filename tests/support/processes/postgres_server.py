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


@contextmanager
def postgres_server() -> Iterator[str]:
    """Start a server and yield SQLAlchemy's URL of its empty database; skip the test without PostgreSQL."""
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
        made = subprocess.run(
            [tools / "initdb", "-D", home / "data", "-U", "smelt", "--auth=trust", "--no-sync"],
            capture_output=True, text=True, cwd=home, check=False, **identity,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        log = home / "server.log"
        with log.open("w") as out:
            server = subprocess.Popen(
                [tools / "postgres", "-D", home / "data", "-k", home, "-F", "-c", "listen_addresses="],
                stdout=out, stderr=out, cwd=home, **identity,
            )  # fmt: skip
        try:
            ready = [tools / "pg_isready", "-q", "-h", home]
            until = time.monotonic() + 60
            while subprocess.run(ready, check=False).returncode:
                if server.poll() is not None or time.monotonic() > until:
                    raise AssertionError(log.read_text())
                time.sleep(0.05)
            yield f"postgresql+psycopg://smelt@/postgres?host={home}"
        finally:
            server.send_signal(signal.SIGINT)  # ends open connections
            server.wait(timeout=60)
    finally:
        shutil.rmtree(home, ignore_errors=True)
