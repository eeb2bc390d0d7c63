"""An S3 server on this machine: moto's, in a process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

_SERVER = (
    "import sys, logging; logging.disable(); from moto.server import ThreadedMotoServer as Server\n"
    "server = Server('127.0.0.1', 0); server.start(); print(server.get_host_and_port()[1], flush=True)\n"
    "sys.stdin.read()"
)


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """Start a server with an empty bucket, set the variables of its clients, and yield the bucket's URL."""
    pytest.importorskip("moto", reason="moto[s3] is not installed")
    pytest.importorskip("flask_cors", reason="flask-cors, which moto's server needs, is not installed")
    s3fs = pytest.importorskip("s3fs", reason="the extra 's3' is not installed")
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert server.stdout
        port = next(line for line in server.stdout if line.strip().isdecimal()).strip()
        values = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        with patch.dict(os.environ, values):
            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().mkdir(bucket)
            yield f"s3://{bucket}"
            s3fs.S3FileSystem.clear_instance_cache()
    finally:
        server.kill()
        server.wait(timeout=60)
