"""An artifact becomes a package: where to, and what is refused before anything is written."""

import shutil

import pytest

import smelt
from smelt.api.package import package_lines
from smelt.core.errors import InputError
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts


@pytest.fixture(scope="module")
def run():
    return exported_artifacts.exported_artifact("classifier").parents[1]


def test_default_folder_is_named_after_step_and_format(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link = run / "artifacts" / "onnx"
    package = smelt.package(link)
    assert (tmp_path / "onnx-standalone" / "infer.py").is_file()
    assert "Accuracy" in (package.folder / "README.md").read_text()
    shutil.rmtree(package.folder)
    assert (
        str(smelt.package(link.resolve()).folder) == "onnx-standalone"
    )  # the store's folder: its step is found


def test_copied_artifact_is_packaged_without_scores(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run / "artifacts" / "onnx", "copied")
    package = smelt.package("copied", "standalone", "out/p")
    assert "Accuracy" not in (package.folder / "README.md").read_text()
    repackaged = smelt.package(package.folder)  # a package is an artifact
    assert str(repackaged.folder) == "p-standalone"


def test_folder_named_by_key_gets_short_package_name(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (run / "artifacts" / "onnx").resolve()
    shutil.copytree(source, source.name)
    assert str(smelt.package(source.name).folder) == f"{source.name[:12]}-standalone"


def test_torch_artifact_error_names_packageable_artifacts(run, tmp_path):
    with raises_code("unsupported-format", InputError) as excinfo:
        smelt.package(run / "artifacts" / "model", out=tmp_path / "p")
    assert all(value in str(excinfo.value) for value in ("torch", "artifacts/onnx"))
    assert list(tmp_path.iterdir()) == []


def test_folders_inside_artifacts_or_run_are_rejected(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    link = copy / "artifacts" / "onnx"
    with raises_code("inside-artifact", InputError):
        smelt.package(link, out=link / "p")
    with raises_code("inside-run", InputError):
        smelt.package(link, out=copy / "artifacts" / "p")
    assert smelt.package(link, out=copy / "p").size_bytes > 0


def test_changed_file_is_not_packaged(run, tmp_path):
    copy = tmp_path / "a"
    shutil.copytree(run / "artifacts" / "onnx", copy)
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    with raises_code("changed-file", InputError):
        smelt.package(copy, out=tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_non_empty_folder_is_rejected_before_work(run, tmp_path):
    (tmp_path / "mine").touch()
    with raises_code("folder-not-empty", InputError):
        smelt.package(run / "artifacts" / "onnx", out=tmp_path)


def test_printed_command_is_quoted_for_shell(run, tmp_path):
    package = smelt.package(run / "artifacts" / "onnx", out=tmp_path / "a b")
    first, install, second = package_lines(package)
    assert f"({package.size_bytes:,} bytes)" in first
    assert "pip install" in install
    assert second == f"Run it: (cd '{tmp_path / 'a b'}' && python infer.py \"TEXT\")"
