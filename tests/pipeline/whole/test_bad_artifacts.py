"""Artifacts that are none: refused in words."""

import json
import shutil

import pytest

from smelt.core.files import sha256_of, write_hashed_json
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.standins.invalid_recipes import RECIPE

pytest_plugins = ["tests.support.standins.invalid_recipes"]


@pytest.fixture(scope="module")
def finished(template):
    (template / "recipe.yaml").write_text(RECIPE)
    result = harness.smelt(
        "run", template / "recipe.yaml", "--until", "model", "--out", template / "run", "--quiet"
    )
    assert result.exit_code == 0, result.output
    return template / "run" / "artifacts" / "model"


def _manifest(**values):
    def change(folder):
        path = folder / "manifest.json"
        write_hashed_json(path, json.loads(path.read_text()) | values)

    return change


def _structure(text):
    """Put a structure into the artifact and list it in the manifest: as who made it would."""

    def change(folder):
        path = folder / "structure.json"
        path.write_text(text)
        content = json.loads((folder / "manifest.json").read_text())
        content["files"][path.name] = {"sha256": sha256_of(path), "size_bytes": path.stat().st_size}
        write_hashed_json(folder / "manifest.json", content)

    return change


def _link(folder):
    (folder.parent / "secret.json").write_text("{}")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder.parent / "secret.json")


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (_manifest(files={"../x": {"sha256": "0" * 64, "size_bytes": 1}}), "path-outside-folder", "'../x'"),
        (_manifest(files={"/etc/passwd": {"sha256": "0" * 64, "size_bytes": 1}}),
         "path-outside-folder", "'/etc/passwd'"),
        (_link, "path-outside-folder", "config.json: "),
        (_manifest(format="pickle"), "damaged-manifest", "manifest.json: "),
        (lambda folder: (folder / "manifest.json").write_text("{"), "damaged-manifest", "manifest.json: "),
        (lambda folder: (folder / "manifest.json").unlink(), "not-an-artifact", ""),
        (lambda folder: (folder / "config.json").unlink(), "missing-file", "config.json: "),
        (lambda folder: (folder / "config.json").write_text("{}"), "changed-file", "config.json: "),
        (lambda folder: (folder / "structure.json").write_text("{}"), "unknown-file", "structure.json: "),
        (_structure('{"edits": [{"op": "run"}]}'), "unknown-edit", "'run'"),
        (_structure('{"edits": 7}'), "damaged-file", ""),
    ],
)  # fmt: skip
def test_invalid_artifacts_are_rejected(finished, tmp_path, change, code, named):
    folder = tmp_path / "a"
    shutil.copytree(finished, folder)
    change(folder)
    error = command_error(harness.smelt("predict", folder, "a cat", code=2))
    assert error.code == code
    assert named in str(error)


def test_missing_folder_is_not_an_artifact(template, tmp_path):
    options = ("--data", template / "data.jsonl")
    assert command_error(harness.smelt("eval", tmp_path / "x", *options)).code == "missing-folder"
    assert command_error(harness.smelt("predict", tmp_path / "x", "a")).code == "missing-folder"
    assert command_error(harness.smelt("report", tmp_path / "x")).code == "missing-file"
