"""What lies in an artifact's folder and was never part of it."""

import hashlib
import json
from dataclasses import replace

import pytest

from smelt.core.artifact import MASTER_WEIGHTS_FILE, FileRecord, Manifest, read_artifact, read_manifest
from smelt.core.errors import InputError
from smelt.core.files import write_hashed_json
from smelt.core.store import Store
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


@pytest.fixture
def written_artifact(tmp_path):
    store = Store(tmp_path)
    with store.workspace() as space:
        out = space / "out"
        (out / "deep").mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "deep/tokenizer.json"):
            (out / name).write_text(name)
        manifest = Manifest(
            key="ab" * 32,
            format="torch",
            task="translation",
            stage="x",
            settings={},
            seed=0,
            parent=None,
            versions={},
        )
        return store.commit(out, manifest)


@pytest.mark.parametrize("name", [
    "model.variant.safetensors", "deep/model.safetensors", "model.safetensors.index.json", "structure.json",
    "generation_config.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/tool.jinja", "spiece.model", "merges.txt", "encoder_model.onnx",
    "model.onnx.data", "decoder_model.onnx_data", "model.plan", "deep/manifest.json", "pytorch_model.bin",
    "notes", "readme.json", "deep/__init__.py",
])  # fmt: skip
def test_file_missing_in_manifest_is_rejected(written_artifact, name):
    path = written_artifact.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    with raises_code("unknown-file", InputError) as excinfo:
        read_artifact(written_artifact.path)
    assert str(excinfo.value).startswith(f"{path}: ")
    with raises_code("unknown-file", InputError):
        Store(written_artifact.path.parents[1]).find(written_artifact.key)
    path.unlink()
    assert read_artifact(written_artifact.path) == written_artifact


@pytest.mark.parametrize("name", [
    ".DS_Store", "._model.safetensors", "deep/.nfs000000000012", ".git/config.json",
    ".cache/huggingface/download/model.safetensors.metadata", "Thumbs.db", "deep/desktop.ini", "README.md",
    "model-card.md", "LICENSE", "License.txt", "deep/NOTICE",
])  # fmt: skip
def test_files_of_systems_and_readers_are_ignored(written_artifact, name):
    path = written_artifact.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    artifact = read_artifact(written_artifact.path)
    assert artifact == written_artifact
    artifact.verify()
    assert artifact.size_bytes == len("model.safetensors")


def test_empty_folder_is_ignored(written_artifact):
    (written_artifact.path / "empty").mkdir()
    assert read_artifact(written_artifact.path) == written_artifact


def test_run_folder_lists_its_artifacts(tmp_path):
    for name in ("onnx-int8", "model"):
        (tmp_path / "artifacts" / name).mkdir(parents=True)
        (tmp_path / "artifacts" / name / "manifest.json").write_text("{}")
    with raises_code("not-an-artifact", InputError) as excinfo:
        read_manifest(tmp_path)
    assert "model, onnx-int8" in str(excinfo.value)
    with raises_code("not-an-artifact", InputError) as excinfo:
        read_manifest(tmp_path / "artifacts")
    assert str(excinfo.value).count("onnx-int8") == 0


def test_master_weights_do_not_count_in_model_size(written_artifact):
    """They lie in the artifact, whose hashes hold them, and count in no size."""
    files = written_artifact.manifest.files | {
        MASTER_WEIGHTS_FILE: FileRecord(sha256="0" * 64, size_bytes=1000)
    }
    with_them = replace(
        written_artifact, manifest=written_artifact.manifest.model_copy(update={"files": files})
    )
    assert with_them.size_bytes == written_artifact.size_bytes == len("model.safetensors")
    assert with_them.model_files == written_artifact.manifest.files
    with raises_code("missing-file", InputError) as excinfo:
        with_them.verify()
    assert MASTER_WEIGHTS_FILE in str(excinfo.value)


def test_model_folder_suggests_init(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with raises_code("not-an-artifact", InputError) as excinfo:
        read_manifest(tmp_path)
    assert f"smelt init {tmp_path}" in str(excinfo.value)


@pytest.mark.parametrize("name", [
    *("numpy.py", "inside/json.PY", "site.pth", "libcuda.so.1", "weights.pt", "pytorch_model.bin", "x.whl"),
    *("requirements.txt", "Dockerfile", "run", "a.py ", "a.json:b.py", "a.json.", "x\n.json"),
    *("CON.json", "aux.onnx", "\u202eexe.json", "a\x85.json", ".git/config.json", "-rf.json"),
])  # fmt: skip
def test_listed_file_of_unknown_kind_is_rejected(written_artifact, name):
    path = written_artifact.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    manifest = json.loads((written_artifact.path / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": hashlib.sha256(b"x").hexdigest(), "size_bytes": 1}
    write_hashed_json(written_artifact.path / "manifest.json", manifest)
    with raises_code("unknown-file", InputError):
        read_artifact(written_artifact.path)
