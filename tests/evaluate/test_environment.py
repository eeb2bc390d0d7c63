import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from smelt.evaluate import environment as module
from smelt.evaluate.environment import describe_environment, list_gpus, machine_id


def test_environment_lists_versions_and_is_serializable() -> None:
    environment = describe_environment()
    assert environment["versions"]["torch"] == version("torch")
    assert environment["python"] == platform.python_version()
    assert environment["cores"] <= environment["logical_cores"] == os.cpu_count()
    if Path("/proc/meminfo").is_file():
        kib = int(Path("/proc/meminfo").read_text().split()[1])
        assert environment["memory_bytes"] == kib * 1024
    assert json.loads(json.dumps(environment)) == environment


def test_machine_id_is_stable_and_depends_on_cpu_and_cores() -> None:
    first = machine_id()
    module.cpu_model.cache_clear()
    assert machine_id() == first
    assert f"{os.cpu_count()} cores" in first
    assert module.cpu_model() in first


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA A10, 23028 MiB, 570.12, 8.6'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    module._gpu_lines.cache_clear()
    try:
        expected = {
            "name": "NVIDIA A10",
            "memory": "23028 MiB",
            "driver": "570.12",
            "compute_capability": "8.6",
        }
        assert list_gpus() == [expected]
        assert machine_id().endswith("NVIDIA A10")
    finally:
        module._gpu_lines.cache_clear()


def test_environment_imports_no_heavy_packages() -> None:
    code = (
        "import sys; from smelt.evaluate.environment import describe_environment; describe_environment();"
        "print([m for m in ('torch', 'transformers', 'onnx', 'onnxruntime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
