"""Artifacts that are none: refused in words."""

import json
import shutil

import harness
import pytest
from refused_recipes import RECIPE

from smelt.core.files import sha256_of


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
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _structure(text):
    """Put a structure into the artifact and list it in the manifest: as who made it would."""

    def change(folder):
        path = folder / "structure.json"
        path.write_text(text)
        content = json.loads((folder / "manifest.json").read_text())
        content["files"][path.name] = {"sha256": sha256_of(path), "size_bytes": path.stat().st_size}
        (folder / "manifest.json").write_text(json.dumps(content))

    return change


def _link(folder):
    (folder.parent / "secret.json").write_text("{}")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder.parent / "secret.json")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_manifest(files={"../x": {"sha256": "0", "size_bytes": 1}}), "the file name '../x' leads out of the artifact"),  # noqa: E501
        (_manifest(files={"/etc/passwd": {"sha256": "0", "size_bytes": 1}}), "'/etc/passwd' leads out"),
        (_link, "config.json: a link to"),
        (_manifest(format="pickle"), "not a manifest that this version of smelt reads"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: not a manifest"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json in this folder"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: this file of the artifact is missing"),  # noqa: E501
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json: its bytes are not those"),
        (lambda folder: (folder / "structure.json").write_text("{}"), "structure.json: this file is not of"),
        (_structure('{"edits": [{"op": "run"}]}'), "unknown edit 'run'"),
        (_structure('{"edits": 7}'), "not a list of edits"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["predict", "eval"])
def test_artifacts_that_are_none(finished, tmp_path, change, word, command):
    folder = tmp_path / "a"
    shutil.copytree(finished, folder)
    change(folder)
    data = ["--data", finished.parents[2] / "data.jsonl"]
    result = harness.smelt(command, folder, *(["a cat"] if command == "predict" else data))
    assert result.exit_code == 2, result.output
    assert word in result.output


def test_what_is_no_folder_is_no_artifact(tmp_path):
    assert "no such folder" in harness.smelt("predict", tmp_path / "x", "a").output
    assert "no such file" in harness.smelt("report", tmp_path / "x").output
