"""What is free, and what is refused."""

import gc
from pathlib import Path

import numpy as np
import psutil
import pytest

from smelt.core.errors import RunError
from smelt.core.system import (
    available_bytes,
    gc_paused,
    memory_limit_bytes,
    peak_memory_bytes,
    require_memory,
    reset_peak_memory,
)
from tests.support.expected_errors import raises_code


def test_available_memory_equals_psutil_without_container(tmp_path):
    available = psutil.virtual_memory().available + psutil.swap_memory().free
    assert available_bytes(tmp_path) == pytest.approx(available, rel=0.2)


def test_container_limit_counts_with_reclaimable_cache(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    assert available_bytes(tmp_path) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 500_000


def test_require_memory_rejects_more_than_is_available():
    require_memory(10, "x", "y", free_bytes=10)
    with raises_code("out-of-memory", RunError) as caught:
        require_memory(20_000_000_000, "finetune", "Try less.", free_bytes=10_000_000_000)
    assert all(part in str(caught.value) for part in ("finetune", "20.0 GB", "10.0 GB"))


@pytest.mark.parametrize("on", [True, False])
def test_gc_paused_restores_collector_state(on):
    (gc.enable if on else gc.disable)()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is on
        with pytest.raises(ZeroDivisionError), gc_paused():
            _ = 1 / 0
        assert gc.isenabled() is on
    finally:
        gc.enable()


def test_memory_limit_is_container_or_machine(tmp_path, monkeypatch):
    limit = memory_limit_bytes(tmp_path)
    assert limit == psutil.virtual_memory().total + psutil.swap_memory().total
    (tmp_path / "memory.max").write_text("1000000\n")
    swap = psutil.swap_memory()._replace(total=5000)  # in addition to the container's memory
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap)
    assert memory_limit_bytes(tmp_path) == 1_005_000
    (tmp_path / "memory.swap.max").write_text("2000\n")
    assert memory_limit_bytes(tmp_path) == 1_002_000


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets the peak")
def test_peak_memory_can_be_reset():
    array = np.ones(2**25)
    highest = peak_memory_bytes()
    del array
    assert reset_peak_memory()
    assert peak_memory_bytes() < highest - 2**27
