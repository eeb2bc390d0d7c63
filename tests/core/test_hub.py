"""Whether the hub is there is known in seconds."""

import socket
import threading

import pytest
from huggingface_hub import constants

from smelt.core import hub
from smelt.core.hub import hub_cache_only, hub_unreachable_reason

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """As where the user has set nothing."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_cached_results", {})
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server():
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def closed():
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    return port


def test_slow_hub_is_reachable(monkeypatch, server):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server}")
    assert hub_unreachable_reason() is None


def test_refused_connection_is_reported_at_once(monkeypatch, closed):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}")
    reason = str(hub_unreachable_reason())
    assert f"http://127.0.0.1:{closed}" in reason
    assert "Connection refused" in reason


def test_proxy_is_connected_if_configured(monkeypatch, server, closed):
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server}")
    assert hub_unreachable_reason() is None
    monkeypatch.setattr(hub, "_cached_results", {})
    monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{closed}")
    assert "Connection refused" in str(hub_unreachable_reason())
    monkeypatch.setattr(hub, "_cached_results", {})
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server}")
    monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{closed}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert hub_unreachable_reason() is None


def test_unresponsive_name_server_times_out(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: release.wait(60))
    monkeypatch.setattr(hub, "CONNECT_TIMEOUT_S", 0.2)
    reason = hub_unreachable_reason()
    assert reason
    monkeypatch.setattr(hub, "_connection_error", lambda *a: pytest.fail("asked again"))
    assert hub_unreachable_reason() == reason
    release.set()


def test_unreachable_address_does_not_hide_reachable_one(monkeypatch, server, closed):
    address_info = socket.AF_INET, socket.SOCK_STREAM, 0, ""
    both = [(*address_info, ("127.0.0.1", closed)), (*address_info, ("127.0.0.1", server))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: both)
    assert hub_unreachable_reason() is None
    monkeypatch.setattr(hub, "_cached_results", {})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(9999, *address_info[1:], ("x", 1)), both[1]])
    assert hub_unreachable_reason() is None


def test_offline_mode_makes_no_connection(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_connection_error", lambda *a: pytest.fail("it was asked"))
    assert hub_unreachable_reason()


def test_hub_cache_only_applies_inside_context():
    import datasets

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    with hub_cache_only("no network"):
        assert constants.HF_HUB_OFFLINE
        assert datasets.config.HF_HUB_OFFLINE
    after = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    assert after == before
    with hub_cache_only(None):
        assert not constants.HF_HUB_OFFLINE
