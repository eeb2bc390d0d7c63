"""Where engines are kept that ONNX Runtime builds: never one of another graph, version or GPU."""

from pathlib import Path

import pytest

from smelt.runtimes import ort_tensorrt_backend
from smelt.runtimes.ort_tensorrt_backend import ENGINE_KEY_FILE, engine_cache_folder

pytestmark = pytest.mark.quick

FOR = {"graph_sha256": "a", "options": {"x": "1"}, "gpus": [["NVIDIA L4", "8.9"]]}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "smelt" / "ort-tensorrt"


def folder(**change: object) -> Path:
    path = engine_cache_folder(FOR | change)
    assert path is not None
    return path


def test_each_graph_version_and_gpu_has_its_own_folder(home: Path) -> None:
    folders = [folder(), folder(graph_sha256="b"), folder(options={}), folder(gpus=[]), folder()]
    assert folders[0] == folders[-1]
    assert len(set(folders)) == 4
    assert {path.parent for path in folders} == {home}


def test_engines_are_kept_while_valid_and_deleted_if_the_key_differs() -> None:
    engine = folder() / "model_1_sm89.engine"
    engine.write_bytes(b"engine")
    assert folder() == engine.parent
    assert engine.is_file()
    for note in ('{"graph_sha256": "other"}', "", "{"):
        engine.write_bytes(b"engine")
        (engine.parent / ENGINE_KEY_FILE).write_text(note)
        assert folder() == engine.parent
        assert [path.name for path in engine.parent.iterdir()] == [ENGINE_KEY_FILE]


def test_unwritable_cache_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.parent.mkdir()
    home.write_text("a file where the folder would be")
    assert engine_cache_folder(FOR) is None
    home.unlink()
    monkeypatch.setattr(ort_tensorrt_backend.os, "access", lambda path, mode: False)
    assert engine_cache_folder(FOR) is None
