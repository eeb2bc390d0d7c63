"""Whether the Hugging Face hub can be asked, found out in seconds.

Its client tries a connection that cannot be made six times, for 23 seconds (huggingface_hub's
`http_backoff`), before it looks into its cache. So it is tried once here, up to the TCP connection: a
server that answers slowly is there.
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

SECONDS = 3.0  # to find the address and to connect to it
_TRUSTED_SECONDS = 30.0  # an answer is taken for true so long: a recipe asks for several things
_PORTS = {"https": 443, "http": 80}
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN)
_asked: dict[str, tuple[float, str | None]] = {}


def hub_lacks() -> str | None:
    """Say why the hub cannot be asked, as the end of a sentence; None where it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "the hub is not asked, because HF_HUB_OFFLINE is set"
    endpoint = str(constants.ENDPOINT)
    when, lack = _asked.get(endpoint, (float("-inf"), None))
    if time.monotonic() - when > _TRUSTED_SECONDS:
        reason = _unreachable(*_address(endpoint))
        lack = reason and f"{endpoint} cannot be reached from here ({reason})"
        _asked[endpoint] = (time.monotonic(), lack)
    return lack


@contextmanager
def cache_alone(lack: str | None) -> Iterator[None]:
    """Where there is a `lack`, make the hub's client and `datasets` look into their caches alone.

    The flag is theirs and the process's, until this context ends: an argument `local_files_only` still
    lets the client ask the network for other things.
    """
    from huggingface_hub import constants

    datasets: Any = sys.modules.get("datasets")
    places: list[Any] = [constants] if datasets is None else [constants, datasets.config]
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = place.HF_HUB_OFFLINE or lack is not None
    try:
        yield
    finally:
        for place, flag in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = flag


def _address(endpoint: str) -> tuple[str, int]:
    """Return host and port of what is connected to: the endpoint, or the proxy before it."""
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(host):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host = parts.hostname or ""
    return host, parts.port or _PORTS.get(parts.scheme, 1080)


def _unreachable(host: str, port: int) -> str | None:
    """Return why no connection to `host` comes about in time, or None.

    In a thread of its own, since nothing else ends the search for an address that no server answers.
    """
    answer: list[str | None] = [f"no connection in {SECONDS:.0f} s"]

    def ask() -> None:
        try:
            answer[0] = _connect(host, port, time.monotonic() + SECONDS)
        except OSError as error:
            answer[0] = error.strerror or str(error)
        except Exception:  # an odd name: let the client say what it thinks of it
            answer[0] = None

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return answer[0]


def _connect(host: str, port: int, deadline: float) -> str | None:
    """Try all addresses of `host` at once, as one of two families of them may lead nowhere.

    Returns:
        None as soon as one connects, else why the last of them did not.
    """
    why = f"no connection in {SECONDS:.0f} s"
    with ExitStack() as opened:
        selector = opened.enter_context(selectors.DefaultSelector())
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                attempt = opened.enter_context(socket.socket(family, kind, protocol))
            except OSError as refusal:  # a family that this system does not have
                why = refusal.strerror or why
                continue
            attempt.setblocking(False)
            error = attempt.connect_ex(address)
            if not error:
                return None
            if error in _UNDER_WAY:
                selector.register(attempt, selectors.EVENT_WRITE, attempt)
            else:
                why = os.strerror(error)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                error = key.data.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not error:
                    return None
                why = os.strerror(error)
                selector.unregister(key.fileobj)
    return why
