"""`smelt store`: what is kept, what nobody needs, what is damaged."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from smelt.cli.store import find_damaged_files, find_store, find_unused, remove_unused, stored_artifacts
from smelt.core.errors import InputError
from smelt.core.locks import STALE_AFTER_S, read_owner, write_owner
from smelt.core.stage_cache import commit_cached_files
from smelt.core.store import Store
from smelt.pipeline.execute.run_folder import cleaning_lock, list_runs, register_run
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.expected_errors import raises_code as expected
from tests.support.models import tiny
from tests.support.processes.concurrent_processes import disable_file_locks

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}
  - factorize: {energy: 0.5, optimize_for: size}
score: {latency: false}
"""


def _run(home, name, *arguments):
    result = harness.smelt("run", home / "recipe.yaml", "--out", home / "runs" / name, "--quiet", *arguments)
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two runs on one store that share the model; the second prunes otherwise and stops there."""
    home = tmp_path_factory.mktemp("home")
    tiny.write_bert(home / "m")
    tiny.write_labeled(home / "data.jsonl", 8)
    (home / "recipe.yaml").write_text(RECIPE)
    _run(home, "one")
    _run(home, "two", "--until", "prune", "--set", "prune.keep_ratio=0.25")
    return home


@pytest.fixture
def home(finished, tmp_path):
    shutil.copytree(finished / "runs", tmp_path / "runs", symlinks=True)
    shutil.rmtree(tmp_path / "runs" / ".store" / "runs")  # its notes name the folders that were copied
    return tmp_path


def test_list_shows_stages_sizes_and_runs(home):
    artifacts = stored_artifacts(home / "runs" / ".store")
    assert [artifact.stage for artifact in artifacts] == ["model", "prune", "factorize", "prune"]
    model, prune, factorize, other = artifacts
    assert model.used_by == ("one/model", "two/model")
    assert factorize.used_by == ("one/factorize",)
    assert (prune.parent, factorize.parent, other.parent) == (model.key, prune.key, model.key)
    for artifact in artifacts:
        folder = home / "runs" / ".store" / "artifacts" / artifact.key
        assert artifact.size_bytes == sum(p.stat().st_size for p in folder.iterdir())
    output = harness.smelt("store", "list", "--store", home / "runs").output
    assert max(map(len, output.splitlines())) <= 80
    assert f"{factorize.key[:12]}  factorize" in output
    content = json.loads(harness.smelt("store", "list", "--store", home / "runs" / ".store", "--json").output)
    assert [a["key"] for a in content["artifacts"]] == [artifact.key for artifact in artifacts]


def test_clean_removes_only_unused_artifacts_and_only_with_yes(home):
    shutil.rmtree(home / "runs" / "two")
    before = find_unused(home / "runs" / ".store")
    assert [artifact.stage for artifact in before.artifacts] == ["prune"]
    dry = harness.smelt("store", "clean", "--store", home / "runs")
    assert "Remove with --yes" in dry.output
    assert len(stored_artifacts(home / "runs" / ".store")) == 4
    scores = len(list((home / "runs" / ".store" / "scores").iterdir()))
    done = harness.smelt("store", "clean", "--store", home / "runs", "--yes")
    assert "Removed 1 artifact" in done.output
    assert [e.stage for e in stored_artifacts(home / "runs" / ".store")] == ["model", "prune", "factorize"]
    assert (
        len(list((home / "runs" / ".store" / "scores").iterdir())) == scores - 4
    )  # quality, agreement, layers, operations
    assert not list((home / "runs" / ".store" / "tmp").iterdir())
    assert "Nothing to remove" in harness.smelt("store", "clean", "--store", home / "runs").output


def test_artifacts_left_by_clean_are_reused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "h", symlinks=True)
    shutil.rmtree(tmp_path / "h" / "runs" / "two")
    remove_unused(tmp_path / "h" / "runs" / ".store")
    _run(tmp_path / "h", "three")
    report = json.loads((tmp_path / "h" / "runs" / "three" / "report.json").read_text())
    assert [s["status"] for s in report["steps"]] == ["cached"] * 3


def test_moved_run_is_known_by_its_record(home, tmp_path):
    store = home / "runs" / ".store"
    shutil.move(home / "runs" / "two", tmp_path / "far")
    assert len(find_unused(store).artifacts) == 1
    for link in (tmp_path / "far" / "artifacts").iterdir():
        target = store / "artifacts" / os.readlink(link).split("/")[-1]
        link.unlink()
        link.symlink_to(target)
    with register_run(store, tmp_path / "far"):
        assert [run.busy for run in list_runs(store)] == [True, False]  # far, one
    assert find_unused(store).artifacts == ()


@pytest.mark.parametrize("locks", [True, False])
def test_clean_is_rejected_while_run_of_other_machine_may_be_active(home, locks, monkeypatch):
    """Its marker is all that is known of it, and that for an hour after the last sign of life."""
    if not locks:
        disable_file_locks(monkeypatch)
    store, far = home / "runs" / ".store", home / "far"
    with register_run(store, far):
        [marker] = (store / "runs").glob("*.owner")
        record = replace(read_owner(marker), kernel="another", host="node2")
    descriptor = os.open(marker, os.O_RDWR | os.O_CREAT)
    write_owner(descriptor, record)
    os.close(descriptor)
    shutil.rmtree(home / "runs" / "two")
    result = harness.smelt("store", "clean", "--store", home / "runs", "--yes")
    assert result.exit_code == 2
    assert command_error(result).code == "store-in-use"
    assert f"{far}." in str(command_error(result))
    os.utime(marker, (time.time() - STALE_AFTER_S - 60,) * 2)
    assert harness.smelt("store", "clean", "--store", home / "runs", "--yes").exit_code == 0


def test_clean_detects_active_run_without_file_locks(home, monkeypatch):
    disable_file_locks(monkeypatch)
    store = home / "runs" / ".store"
    with register_run(store, home / "runs" / "one"):
        assert [run.busy for run in list_runs(store)] == [True, False]
        with expected("store-in-use", InputError):
            remove_unused(store)
    remove_unused(store)


def test_run_started_during_clean_waits(home):
    """Else it could take an artifact that is just being removed."""
    store, start_times = home / "runs" / ".store", []

    def begin():
        with register_run(store, home / "far"):
            start_times.append(time.monotonic())

    with cleaning_lock(store):
        other = threading.Thread(target=begin)
        other.start()
        time.sleep(0.5)
        end_time = time.monotonic()
        assert start_times == []
    other.join(20)
    assert start_times[0] >= end_time


def test_artifact_with_extra_file_is_listed_and_reported_damaged(home):
    store = home / "runs" / ".store"
    artifact = stored_artifacts(store)[0]
    (store / "artifacts" / artifact.key / "extra.json").touch()
    assert stored_artifacts(store)[0].stage == artifact.stage == "model"
    (store / "artifacts" / artifact.key / "config.json").write_text("{}")
    extra, changed = find_damaged_files(store)
    assert extra.path == store / "artifacts" / artifact.key / "extra.json"
    assert "manifest.json" in extra.problem
    assert changed.path == store / "artifacts" / artifact.key / "config.json"


def test_clean_is_rejected_while_run_is_active(home):
    store = home / "runs" / ".store"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from smelt.pipeline.execute.run_folder import register_run\n"
        f"with register_run(Path({str(store)!r}), Path({str(home / 'runs' / 'one')!r})):\n"
        "    print('here', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() == "here"
        shutil.rmtree(home / "runs" / "two")
        result = harness.smelt("store", "clean", "--store", home / "runs", "--yes")
        assert result.exit_code == 2
        assert command_error(result).code == "store-in-use"
    finally:
        process.kill()
        process.wait()
    assert harness.smelt("store", "clean", "--store", home / "runs", "--yes").exit_code == 0


def test_check_names_each_damaged_file(home):
    assert harness.smelt("store", "check", "--store", home / "runs").exit_code == 0
    store = home / "runs" / ".store"
    keys = [artifact.key for artifact in stored_artifacts(store)]
    artifacts = [store / "artifacts" / key for key in keys]
    weights = artifacts[1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (artifacts[2] / "config.json").unlink()
    with (artifacts[2] / "structure.json").open("a") as file:
        file.write(" ")
    shutil.rmtree(artifacts[3])  # the second run links to it
    manifest = artifacts[0] / "manifest.json"
    warning_text = '{"code": "made-up", "message": "all is well"}'
    manifest.write_text(manifest.read_text().replace('"warnings": [', f'"warnings": [{warning_text}', 1))
    with register_run(store, home / "far"):
        pass
    hashed = [next((store / name).glob("*.json")) for name in ("scores", "checked", "runs")]
    for path in hashed:
        path.write_text(path.read_text().replace("a", "b", 1))
    broken = artifacts[0].with_name("e" * 64)
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    problems = {damage.path: damage.problem for damage in find_damaged_files(store)}
    changed = {artifacts[2] / "config.json", artifacts[2] / "structure.json", broken / "manifest.json"}
    assert set(problems) == {weights, manifest, artifacts[3], *hashed, *changed}
    assert str(home / "runs" / "two") in problems[artifacts[3]]
    result = harness.smelt("store", "check", "--store", home / "runs")
    assert result.exit_code == 1
    assert f"{weights}: {problems[weights]}" in result.output
    assert "?" in {artifact.stage for artifact in stored_artifacts(store)}


def test_clean_is_rejected_while_run_record_is_damaged(home):
    """The artifacts that this run uses would be removed."""
    store, far = home / "runs" / ".store", home / "far"
    with register_run(store, far):
        [record] = (store / "runs").glob("*.json")
    record.write_text(record.read_text().replace("far", "fat"))
    result = harness.smelt("store", "clean", "--store", home / "runs", "--yes", code=2)
    assert command_error(result).code == "damaged-run-record"
    with register_run(store, far):  # the run mends it
        pass
    harness.smelt("store", "clean", "--store", home / "runs", "--yes", code=0)


def test_cached_files_are_listed_checked_and_removed_with_their_artifact(home):
    root = home / "runs" / ".store"
    store = Store(root)
    model = stored_artifacts(root)[0].key
    for key, source_key in (("a" * 64, model), ("b" * 64, "f" * 64)):
        with store.workspace() as space:
            (space / "out").mkdir()
            (space / "out" / "values.npy").write_bytes(b"1234")
            commit_cached_files(store, space / "out", key, f"the logits of {source_key[0]}", [source_key])
    output = harness.smelt("store", "list", "--store", home / "runs", code=0).output
    assert f"the logits of {model[0]}" in output
    assert "the logits of f" in output
    harness.smelt("store", "check", "--store", home / "runs", code=0)
    (root / "kept" / ("a" * 64) / "values.npy").write_bytes(b"1235")
    check = harness.smelt("store", "check", "--store", home / "runs", code=1).output
    assert str(root / "kept" / ("a" * 64) / "values.npy") in check
    assert "1 folder" in harness.smelt("store", "clean", "--store", home / "runs").output
    harness.smelt("store", "clean", "--store", home / "runs", "--yes", code=0)
    remaining = {path.name for path in (root / "kept").iterdir()}
    assert "a" * 64 in remaining
    assert "b" * 64 not in remaining


def test_missing_store_and_mistyped_command_are_explained(tmp_path):
    with expected("missing-store", InputError):
        find_store(tmp_path)
    assert harness.smelt("store", "list", "--store", tmp_path).exit_code == 2
    result = harness.smelt("store", "lst")
    assert result.exit_code == 2
    assert "'list'?" in result.output
