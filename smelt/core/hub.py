"""Check within seconds whether the Hugging Face hub can be reached.

Its client retries a failing connection six times, for 23 seconds (huggingface_hub's `http_backoff`), before
it uses its cache. So one attempt is made here, up to the TCP connection: a slow server counts as
reachable.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 3.0  # to resolve the address and connect
_RESULT_VALID_S = 30.0  # a result is cached this long: a recipe needs several downloads
_PORTS = {"https": 443, "http": 80}
_CONNECT_IN_PROGRESS = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN)
_cached_results: dict[str, tuple[float, str | None]] = {}


def hub_unreachable_reason() -> str | None:
    """Return why the hub cannot be reached, as the end of a sentence; None if it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "the hub is not asked, because HF_HUB_OFFLINE is set"
    endpoint = str(constants.ENDPOINT)
    cached_at, failure = _cached_results.get(endpoint, (float("-inf"), None))
    if time.monotonic() - cached_at > _RESULT_VALID_S:
        reason = _connection_error(*_host_and_port(endpoint))
        failure = reason and f"{endpoint} cannot be reached from here ({reason})"
        _cached_results[endpoint] = (time.monotonic(), failure)
    return failure


@contextmanager
def hub_cache_only(reason: str | None) -> Iterator[None]:
    """If there is a `reason`, restrict the hub's client and `datasets` to their caches inside the context.

    The flags are global for the process: the argument `local_files_only` still lets the client use the
    network for other requests.
    """
    from huggingface_hub import constants

    datasets: Any = sys.modules.get("datasets")
    configs: list[Any] = [constants] if datasets is None else [constants, datasets.config]
    before = [hub_config.HF_HUB_OFFLINE for hub_config in configs]
    for hub_config in configs:
        hub_config.HF_HUB_OFFLINE = hub_config.HF_HUB_OFFLINE or reason is not None
    try:
        yield
    finally:
        for hub_config, flag in zip(configs, before, strict=True):
            hub_config.HF_HUB_OFFLINE = flag


def _host_and_port(endpoint: str) -> tuple[str, int]:
    """Return host and port to connect to: of the endpoint, or of its proxy."""
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(host):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host = parts.hostname or ""
    return host, parts.port or _PORTS.get(parts.scheme, 1080)


def _connection_error(host: str, port: int) -> str | None:
    """Return why `host` cannot be connected to in time, or None.

    In a separate thread, because a name lookup without an answering server cannot be interrupted.
    """
    failure: list[str | None] = [f"no connection in {CONNECT_TIMEOUT_S:.0f} s"]

    def ask() -> None:
        try:
            failure[0] = _try_connect(host, port, time.monotonic() + CONNECT_TIMEOUT_S)
        except OSError as error:
            failure[0] = error.strerror or str(error)
        except Exception:  # an invalid name: the client reports it
            failure[0] = None

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S)
    return failure[0]


def _try_connect(host: str, port: int, deadline: float) -> str | None:
    """Try all addresses of `host` at once, because one of two address families may not work.

    Returns:
        None as soon as one connects, else the reason of the last failure.
    """
    failure = f"no connection in {CONNECT_TIMEOUT_S:.0f} s"
    with ExitStack() as sockets:
        selector = sockets.enter_context(selectors.DefaultSelector())
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                attempt = sockets.enter_context(socket.socket(family, kind, protocol))
            except OSError as refusal:  # an address family that this system lacks
                failure = refusal.strerror or failure
                continue
            attempt.setblocking(False)
            error = attempt.connect_ex(address)
            if not error:
                return None
            if error in _CONNECT_IN_PROGRESS:
                selector.register(attempt, selectors.EVENT_WRITE, attempt)
            else:
                failure = os.strerror(error)
        while selector.get_map() and (remaining_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_s):
                error = key.data.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not error:
                    return None
                failure = os.strerror(error)
                selector.unregister(key.fileobj)
    return failure
