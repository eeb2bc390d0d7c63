"""What of ONNX Runtime's provider of TensorRT is missing on a machine, without loading it."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from smelt.core.errors import MissingDependencyError
from smelt.runtimes import ort_tensorrt_provider
from smelt.runtimes.ort_tensorrt_provider import (
    linked_versions,
    missing_requirement,
    provider_device,
)
from tests.support.expected_errors import raises_code

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("libnvinfer.so.10", "libnvonnxparser.so.10")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU, an onnxruntime-gpu linked with TensorRT 10, TensorRT 11 installed, an empty loader's path."""
    library = tmp_path / "libonnxruntime_providers_tensorrt.so"
    library.write_bytes(b"\x7fELF\0libnvinfer.so.10\0libcudart.so.13\0")
    path = tmp_path / "libraries"
    path.mkdir()
    monkeypatch.setattr(ort_tensorrt_provider, "cuda_device_count", lambda: 1)
    monkeypatch.setattr(ort_tensorrt_provider, "provider_library", lambda: library)
    monkeypatch.setattr(ort_tensorrt_provider, "find_spec", lambda name: None)
    monkeypatch.setattr(ort_tensorrt_provider, "_SYSTEM", ())
    monkeypatch.setattr(
        ort_tensorrt_provider,
        "package_versions",
        lambda names: {
            name: number
            for name, number in {"onnxruntime-gpu": "1.31.1", "tensorrt": "11.4.0"}.items()
            if name in names
        },
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(path))
    return path


@pytest.mark.skipif(ort_tensorrt_provider._WINDOWS, reason="Linux's names of libraries")
def test_mismatched_tensorrt_version_error_names_the_version_to_install(here: Path) -> None:
    missing = missing_requirement()
    packages = (
        "onnxruntime-gpu 1.31.1",
        "libnvinfer.so.10",
        "tensorrt 11.4.0",
        "pip install 'tensorrt-cu13==10.*'",
    )
    assert [value for value in packages if value not in missing] == []
    (here / NAMES[0]).touch()
    assert missing_requirement() is not None  # the parser is wanted too
    (here / NAMES[1]).touch()
    assert missing_requirement() is None
    assert [path.name for path in ort_tensorrt_provider.find_tensorrt_libraries(10) or []] == list(NAMES)


def test_extra_requires_the_tensorrt_linked_by_onnx_runtime() -> None:
    """Neither package's metadata has this requirement; the library itself does."""
    library = ort_tensorrt_provider.provider_library()
    if library is None:
        pytest.skip("this onnxruntime has no provider of TensorRT")
    linked = linked_versions(library)
    assert linked is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extra = [Requirement(line) for line in project["project"]["optional-dependencies"]["ort-tensorrt"]]
    requirements = {requirement.name: requirement for requirement in extra}
    assert str(requirements[f"tensorrt-cu{linked.cuda}"].specifier) == f"=={linked.tensorrt}.*"
    assert (
        ort_tensorrt_provider.package_versions(["onnxruntime-gpu"])["onnxruntime-gpu"]
        in requirements["onnxruntime-gpu"].specifier
    )


def test_onnx_runtime_without_the_provider_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_tensorrt_provider, "provider_library", lambda: None)
    with raises_code("not-installed", MissingDependencyError) as caught:
        provider_device("cuda", "ort-tensorrt")
    assert str(caught.value) == missing_requirement()
    assert all(part in str(caught.value) for part in ("onnxruntime-gpu 1.31.1", "TensorrtExecutionProvider"))


def test_device_is_checked_before_the_provider(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [provider_device(device, "ort-tensorrt") for device in ("auto", "cpu")] == ["cpu", "cpu"]
    with raises_code("not-installed", MissingDependencyError) as caught:
        provider_device("cuda", "ort-tensorrt")
    assert "TensorRT 10" in str(caught.value)
    monkeypatch.setattr(ort_tensorrt_provider, "_missing_package", lambda: None)
    assert [provider_device(w, "ort-tensorrt") for w in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    monkeypatch.setattr(ort_tensorrt_provider, "cuda_device_count", lambda: 0)
    assert provider_device("auto", "ort-tensorrt") == "cpu"
    with raises_code("no-gpu", MissingDependencyError) as caught:
        provider_device("cuda", "ort-tensorrt")
    assert str(caught.value) == missing_requirement()
