"""An artifact is complete or absent."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from smelt.core.artifact import Manifest, read_artifact
from smelt.core.errors import InputError, RunError
from smelt.core.files import MANIFEST
from smelt.core.locks import STALE_AFTER_S, current_owner, read_owner, write_owner
from smelt.core.messages import message_codes
from smelt.core.store import Store
from tests.support.expected_errors import raises_code
from tests.support.processes.concurrent_processes import disable_file_locks

KEY = "ab" * 32


def _manifest(key=KEY):
    return Manifest(
        key=key, format="torch", task="translation", stage="x", settings={}, seed=0, parent=None, versions={}
    )


def _write(store, text="hello"):
    with store.workspace() as space:
        out = space / "out"
        (out / "deep").mkdir(parents=True)
        (out / "model.safetensors").write_text(text)
        (out / "deep" / "b.json").write_text("b")
        return store.commit(out, _manifest())


def test_committed_artifact_verifies(tmp_path):
    store = Store(tmp_path)
    artifact = _write(store)
    stored = store.find(KEY)
    assert stored == artifact
    assert set(stored.manifest.files) == {"model.safetensors", "deep/b.json"}
    assert stored.size_bytes == 5
    stored.verify()
    assert not list((tmp_path / "tmp").iterdir())


def test_verify_names_changed_or_missing_file(tmp_path):
    artifact = _write(Store(tmp_path))
    (artifact.path / "model.safetensors").write_text("hellO")
    with raises_code("changed-file", InputError) as excinfo:
        artifact.verify()
    assert "model.safetensors" in str(excinfo.value)
    (artifact.path / "model.safetensors").unlink()
    with raises_code("missing-file", InputError) as excinfo:
        artifact.verify()
    assert "model.safetensors" in str(excinfo.value)


@pytest.mark.quick
def test_first_of_two_writers_wins(tmp_path):
    store = Store(tmp_path)
    _write(store, "first")
    assert (_write(store, "second").path / "model.safetensors").read_text() == "first"


def test_failed_stage_leaves_no_files(tmp_path):
    store = Store(tmp_path)

    def fail():
        with store.workspace() as space:
            (space / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert store.find(KEY) is None
    assert not list((tmp_path / "tmp").iterdir())


def test_workspace_of_killed_process_is_removed(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from smelt.core.store import Store\n"
        "with Store(Path(sys.argv[1])).workspace() as space:\n"
        "    (space / 'x').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert len(list((tmp_path / "tmp").iterdir())) == 2  # the folder and its marker
    Store(tmp_path)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("locks", [True, False])
def test_workspace_of_living_process_is_kept(tmp_path, locks, monkeypatch):
    if not locks:
        disable_file_locks(monkeypatch)
    store = Store(tmp_path)
    with store.workspace() as space:
        assert list(space.iterdir()) == []
        for path in (space, _marker(space)):
            os.utime(path, (0, 0))
        Store(tmp_path)
        assert space.is_dir()
    assert not list((tmp_path / "tmp").iterdir())


def _marker(space):
    return space.with_name(f"{space.name}.owner")


def _work_of(store, silent_s, **changes):
    """Leave the work of another process in the store, of which nothing was heard for so long."""
    with store.workspace() as space:
        record = replace(read_owner(_marker(space)), **changes)
    space.mkdir()
    (space / "x").write_text("half")
    descriptor = os.open(_marker(space), os.O_RDWR | os.O_CREAT)
    write_owner(descriptor, record)
    os.close(descriptor)
    for path in (space, _marker(space)):
        os.utime(path, (time.time() - silent_s,) * 2)
    return space


@pytest.mark.parametrize("locks", [True, False])
def test_workspace_of_other_machine_is_removed_only_after_long_silence(tmp_path, locks, monkeypatch):
    """Its number is nobody's here, and its lock, if it has one, may be seen by its own machine alone."""
    if not locks:
        disable_file_locks(monkeypatch)
    store = Store(tmp_path)
    other = {"kernel": "another", "host": "node2", "process": 2**22 + 1, "locked": locks}
    fresh, old = _work_of(store, STALE_AFTER_S - 60, **other), _work_of(store, STALE_AFTER_S + 60, **other)
    Store(tmp_path)
    assert (fresh / "x").is_file()
    assert not old.exists()
    assert {path.name for path in (tmp_path / "tmp").iterdir()} == {fresh.name, _marker(fresh).name}


def test_workspace_of_reused_process_id_is_removed(tmp_path, monkeypatch):
    disable_file_locks(monkeypatch)
    store = Store(tmp_path)
    active = _work_of(store, 0)  # as of this very process
    stale = _work_of(store, 0, started=current_owner().started - 60)
    Store(tmp_path)
    assert active.is_dir()
    assert not stale.exists()


def test_folder_without_marker_is_removed_only_after_long_silence(tmp_path):
    for name, silent_s in (("fresh", STALE_AFTER_S - 60), ("old", STALE_AFTER_S + 60)):
        folder = Store(tmp_path).root / "tmp" / name
        folder.mkdir()
        os.utime(folder, (time.time() - silent_s,) * 2)
    Store(tmp_path)
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["fresh"]


@pytest.mark.parametrize("where", ["scores", "checked", "runs"])
def test_old_partial_files_are_removed(tmp_path, where):
    (Store(tmp_path).root / where).mkdir(exist_ok=True)
    complete, fresh, old = (
        tmp_path / where / name for name in ("k.json", ".k.json.1a.part", ".k.json.2b.part")
    )
    for path in (complete, fresh, old):
        path.touch()
    for path in (complete, old):
        os.utime(path, (0, 0))
    Store(tmp_path)
    assert sorted((tmp_path / where).iterdir()) == sorted([complete, fresh])


def test_scores_are_stored_and_broken_score_is_absent(tmp_path):
    store = Store(tmp_path)
    assert store.read_score("k") is None
    store.write_score("k", {"bleu": 1.5})
    assert Store(tmp_path).read_score("k") == {"bleu": 1.5}
    (tmp_path / "scores" / "k.json").write_text("{")
    assert store.read_score("k") is None


def test_find_detects_changed_manifest(tmp_path):
    store = Store(tmp_path)
    manifest = _write(store).path / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text.replace('"stage": "', '"stage": "other '))
    for _ in range(2):
        with raises_code("changed-manifest", InputError):
            store.find(KEY)
    manifest.write_text(text)
    assert store.find(KEY) is not None


def test_outdated_checked_file_does_not_affect_new_artifact(tmp_path, monkeypatch):
    store = Store(tmp_path)
    _write(store)
    monkeypatch.setattr(Store, "_write_checked", lambda *_: None)  # as on a full disk
    with store.workspace() as space:
        (space / "out").mkdir()
        (space / "out" / "model.safetensors").write_text("other")
        artifact = store.commit(space / "out", _manifest().model_copy(update={"seconds": 9.0}), replace=True)
    assert store.find(KEY) == artifact


def test_unknown_files_are_not_committed(tmp_path):
    store = Store(tmp_path)
    with store.workspace() as space:
        (space / "out").mkdir()
        (space / "out" / "LICENSE.txt").write_text("free")
        with pytest.raises(InputError) as error:
            store.commit(space / "out", _manifest())
    assert error.value.code == "unknown-file"
    assert list((tmp_path / "artifacts").iterdir()) == []


@pytest.mark.quick
def test_removed_artifact_is_not_found(tmp_path):
    store = Store(tmp_path)
    _write(store)
    store.remove(KEY)
    assert store.find(KEY) is None
    store.remove(KEY)


def test_manifest_with_path_outside_folder_is_rejected(tmp_path):
    artifact = _write(Store(tmp_path))
    file = artifact.path / "manifest.json"
    file.write_text(file.read_text().replace("deep/b.json", "../../evil"))
    with raises_code("path-outside-folder", InputError) as excinfo:
        read_artifact(artifact.path)
    assert "../../evil" in str(excinfo.value)


@pytest.mark.parametrize("content", ["", "{}", '{"key": 3}', "[1]"])
def test_invalid_manifest_is_explained(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with raises_code("damaged-manifest", InputError) as excinfo:
        read_artifact(tmp_path)
    assert "manifest.json" in str(excinfo.value)


def test_folder_without_manifest_is_not_an_artifact(tmp_path):
    with raises_code("not-an-artifact", InputError):
        read_artifact(tmp_path)
    with raises_code("missing-folder", InputError):
        read_artifact(tmp_path / "nothing")


def test_find_detects_changed_byte_and_names_file(tmp_path):
    artifact = _write(Store(tmp_path))
    weights = artifact.path / "model.safetensors"
    weights.write_text("hellO")
    with raises_code("changed-file", InputError) as excinfo:
        Store(tmp_path).find(KEY, "Do this.")
    assert all(part in str(excinfo.value) for part in ("model.safetensors", "Do this."))
    weights.write_text("hello")
    assert Store(tmp_path).find(KEY) == artifact


def test_find_detects_changed_byte_with_old_timestamp(tmp_path):
    artifact = _write(Store(tmp_path))
    weights = artifact.path / "model.safetensors"
    before = weights.stat()
    weights.write_text("hellO")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with raises_code("changed-file", InputError):
        Store(tmp_path).find(KEY)


def test_find_hashes_only_files_that_may_have_changed(tmp_path, monkeypatch):
    from smelt.core import artifact

    stored = _write(Store(tmp_path))
    hashed = []
    original = artifact.sha256_of
    monkeypatch.setattr(artifact, "sha256_of", lambda path: hashed.append(path.name) or original(path))
    assert Store(tmp_path).find(KEY) == stored
    assert hashed == []
    (stored.path / "model.safetensors").touch()
    assert Store(tmp_path).find(KEY) == stored
    assert sorted(hashed) == ["b.json", "model.safetensors"]
    assert Store(tmp_path).find(KEY) == stored
    assert len(hashed) == 2


def test_find_rejects_manifest_of_other_artifact(tmp_path):
    store = Store(tmp_path)
    artifact = _write(store)
    artifact.path.rename(artifact.path.with_name("cd" * 32))
    with raises_code("wrong-manifest", InputError):
        store.find("cd" * 32)


def test_replace_overwrites_old_artifact(tmp_path):
    store = Store(tmp_path)
    _write(store, "first")
    with store.workspace() as space:
        out = space / "out"
        out.mkdir()
        (out / "model.safetensors").write_text("second")
        store.commit(out, _manifest(), replace=True)
    assert (store.find(KEY).path / "model.safetensors").read_text() == "second"
    assert not list((tmp_path / "tmp").iterdir())


def test_old_artifact_is_restored_if_replacement_fails(tmp_path, monkeypatch):
    store = Store(tmp_path)
    _write(store, "first")
    rename = os.rename

    def fails_for_the_new(source, target):
        if Path(source).name == "out":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with store.workspace() as space:
        (space / "out").mkdir()
        (space / "out" / "model.safetensors").write_text("second")
        monkeypatch.setattr(os, "rename", fails_for_the_new)
        with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
            store.commit(space / "out", _manifest(), replace=True)
    assert (store.find(KEY).path / "model.safetensors").read_text() == "first"


def test_nested_file_named_as_manifest_is_hashed(tmp_path):
    store = Store(tmp_path)
    with store.workspace() as space:
        (space / "out" / "deep").mkdir(parents=True)
        (space / "out" / "deep" / "manifest.json").write_text("{}")
        artifact = store.commit(space / "out", _manifest())
    assert set(artifact.manifest.files) == {"deep/manifest.json"}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002], ids=oct)
def test_store_files_follow_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        store = Store(tmp_path / "s")
        with store.workspace() as space:
            modes = {path: _mode(path) for path in (space, _marker(space))}
            out = space / "out"
            out.mkdir(mode=0o700)
            (out / "model.safetensors").touch(0o600)
            store.commit(out, _manifest())
            with store.lock("x", print):
                modes |= {path: _mode(path) for path in (tmp_path / "s").rglob("*")}
        store.write_score("k", {})
        modes |= {path: _mode(path) for path in (tmp_path / "s").rglob("*")}
    finally:
        os.umask(before)
    assert len(modes) >= 12
    folders = {path for path, mode in modes.items() if not path.suffix}
    assert {modes[path] for path in folders} == {0o777 & ~umask}
    assert {modes[path] for path in modes.keys() - folders} == {0o666 & ~umask}


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", ["/etc/passwd", "..", "a/../../b", "..\\b", "C:\\b", "", ".", "a\0b"])
def test_file_names_outside_folder_are_rejected(tmp_path, name):
    artifact = _write(Store(tmp_path))
    content = json.loads((artifact.path / "manifest.json").read_text())
    content["files"][name] = {"sha256": "0" * 64, "size_bytes": 1}
    (artifact.path / "manifest.json").write_text(json.dumps(content))
    with raises_code("path-outside-folder", InputError):
        read_artifact(artifact.path)


@pytest.mark.parametrize("target", ["../../outside", "/etc/hostname", ".loop"])
def test_links_outside_folder_are_rejected_and_named(tmp_path, target):
    artifact = _write(Store(tmp_path))
    (artifact.path / "deep" / "model.safetensors").symlink_to("../model.safetensors")
    with raises_code("unknown-file", InputError) as excinfo:
        read_artifact(artifact.path)
    assert "deep/model.safetensors" in str(excinfo.value)
    (artifact.path / "deep" / "model.safetensors").unlink()
    (artifact.path / "deep" / ".inner").symlink_to("b.json")
    assert read_artifact(artifact.path) == artifact
    (tmp_path / "outside").write_text("secret")
    (artifact.path / "deep" / ".loop").symlink_to(".loop")
    (artifact.path / "deep" / "b.json").unlink()
    (artifact.path / "deep" / "b.json").symlink_to(target)
    if target == ".loop":
        with raises_code("missing-file", InputError) as excinfo:
            read_artifact(artifact.path).verify()
        assert "b.json" in str(excinfo.value)
        return
    with raises_code("path-outside-folder", InputError) as excinfo:
        read_artifact(artifact.path)
    assert "b.json" in str(excinfo.value)


def test_read_only_store_can_be_read(tmp_path):
    """As root, who may write everywhere, through a child that becomes nobody."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from smelt.core.store import Store; from smelt.core.errors import InputError\n"
        "os.geteuid() or os.setuid(65534)\n"
        "warnings = []\n"
        "store = Store(Path(sys.argv[1]), warn=warnings.append)\n"
        "with store.lock('k', print): print(store.find(sys.argv[2]).path, store.read_score('k'))\n"
        "store.write_score('other', {}); print(warnings[0].code)\n"
        "for try_it in (store.workspace().__enter__, lambda: Store(Path(sys.argv[1]) / 'new')):\n"
        "    try: try_it()\n"
        "    except InputError as error: print(error.code, error.__cause__.errno, error)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        store = Store(Path(folder) / "s")
        artifact = _write(store)
        store.write_score("k", {"n": 1})
        for path in (store.root, *store.root.iterdir()):
            path.chmod(0o555)
        command = [sys.executable, "-c", code, str(store.root), KEY]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        result, warned, *errors = done.stdout.splitlines()
        assert (result, warned) == (f"{artifact.path} {{'n': 1}}", "read-only-store"), done.stderr
        assert errors[0].startswith(f"unusable-store {errno.EACCES} {store.root}: ")
        assert errors[1].startswith(f"unusable-store {errno.EACCES} {store.root / 'new'}: ")


def test_removed_store_is_explained_and_not_recreated(tmp_path):
    store = Store(tmp_path / "s")
    with store.workspace() as space:
        (space / "out").mkdir()
        shutil.rmtree(store.root)
        with raises_code("store-removed", RunError):
            store.commit(space / "out", _manifest())
    for use in (
        store.workspace().__enter__,
        lambda: store.lock("k", print),
        lambda: store.write_score("k", {}),
    ):
        with raises_code("store-removed", RunError):
            use()
    assert not store.root.exists()


SCORE = {"bleu": {"value": 93.63}, "n": 16, "odd": [float("nan"), 1e-300, {"1": "é"}]}


def test_score_with_any_changed_byte_is_absent(tmp_path):
    store = Store(tmp_path)
    store.write_score("k", {"bleu": {"value": 93.63}, "n": 16})
    file = tmp_path / "scores" / "k.json"
    content = file.read_bytes()
    for index in range(len(content)):
        changed = bytearray(content)
        changed[index] ^= 1
        file.write_bytes(changed)
        assert store.read_score("k") in (None, {"bleu": {"value": 93.63}, "n": 16}), bytes(changed)
    store.write_score("k", {"n": 2})  # it is written again
    assert store.read_score("k") == {"n": 2}


def test_json_values_round_trip_in_scores(tmp_path):
    store = Store(tmp_path)
    store.write_score("k", SCORE | {1: (2,), "content_sha256": "an earlier one"})
    assert repr(store.read_score("k")) == repr(SCORE | {"1": [2]})


def test_changed_checked_file_does_not_affect_verification(tmp_path):
    store = Store(tmp_path)
    artifact = _write(store)
    note = tmp_path / "checked" / f"{KEY}.json"
    text = note.read_text()
    for old, new in (("model.safetensors", "model.safetensorz"), ("content_sha256", "content_sha25.")):
        note.write_text(text.replace(old, new))
        assert store.find(KEY) == artifact
        assert note.read_text() == text
    note.write_text(text)
    note.unlink()  # as on a machine that has just copied the artifact
    manifest = artifact.path / MANIFEST
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
    with raises_code("changed-manifest", InputError):
        store.find(KEY)
    with raises_code("changed-manifest", InputError):
        read_artifact(artifact.path)


@pytest.mark.parametrize("missing", ["model.safetensors", "deep", MANIFEST])
def test_artifact_with_missing_files_is_absent_and_replaced(tmp_path, missing):
    """As one whose whole folder was removed."""
    warnings = []
    store = Store(tmp_path, warn=warnings.append)
    path = _write(store).path / missing
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    assert store.find(KEY) is None
    assert message_codes(warnings) == ["incomplete-artifact"]
    assert str(path) in str(warnings[0])
    assert store.find(_write(store).key) is not None
    assert path.exists()
    assert not list((tmp_path / "tmp").iterdir())
