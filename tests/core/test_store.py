"""An artifact is complete or absent."""

import os
import subprocess
import sys

import pytest

from smelt.core.artifact import Manifest, read_artifact
from smelt.core.errors import InputError
from smelt.core.store import Store

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
        (out / "deep" / "b.txt").write_text("b")
        return store.commit(out, _manifest())


def test_commit_makes_an_artifact_whose_files_verify(tmp_path):
    store = Store(tmp_path)
    made = _write(store)
    found = store.find(KEY)
    assert found == made
    assert set(found.manifest.files) == {"model.safetensors", "deep/b.txt"}
    assert found.size_bytes == 5
    found.verify()
    assert not list((tmp_path / "tmp").iterdir())


def test_verify_names_the_file_that_changed_or_is_gone(tmp_path):
    made = _write(Store(tmp_path))
    (made.path / "model.safetensors").write_text("hellO")
    with pytest.raises(InputError, match=r"model\.safetensors: its bytes are not those"):
        made.verify()
    (made.path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors: this file of the artifact is missing"):
        made.verify()


def test_the_first_of_two_writers_wins(tmp_path):
    store = Store(tmp_path)
    _write(store, "first")
    assert (_write(store, "second").path / "model.safetensors").read_text() == "first"


def test_a_failed_stage_leaves_nothing(tmp_path):
    store = Store(tmp_path)

    def fail():
        with store.workspace() as space:
            (space / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert store.find(KEY) is None
    assert not list((tmp_path / "tmp").iterdir())


def test_work_of_a_killed_process_is_swept(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from smelt.core.store import Store\n"
        "with Store(Path(sys.argv[1])).workspace() as space:\n"
        "    (space / 'x').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    Store(tmp_path)
    assert not list((tmp_path / "tmp").iterdir())


def test_work_of_a_living_process_is_left_alone(tmp_path):
    store = Store(tmp_path)
    with store.workspace() as space:
        Store(tmp_path)
        assert space.is_dir()


def test_scores_are_kept_and_a_broken_one_counts_as_none(tmp_path):
    store = Store(tmp_path)
    assert store.read_score("k") is None
    store.write_score("k", {"bleu": 1.5})
    assert Store(tmp_path).read_score("k") == {"bleu": 1.5}
    (tmp_path / "scores" / "k.json").write_text("{")
    assert store.read_score("k") is None


def test_remove_forgets(tmp_path):
    store = Store(tmp_path)
    _write(store)
    store.remove(KEY)
    assert store.find(KEY) is None
    store.remove(KEY)


def test_a_manifest_that_points_outside_is_refused(tmp_path):
    made = _write(Store(tmp_path))
    file = made.path / "manifest.json"
    file.write_text(file.read_text().replace("deep/b.txt", "../../evil"))
    with pytest.raises(InputError, match="leads out of the artifact"):
        read_artifact(made.path)


@pytest.mark.parametrize("content", ["", "{}", '{"key": 3}', "[1]"])
def test_a_manifest_that_is_none_is_explained(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(InputError, match=r"manifest\.json: not a manifest"):
        read_artifact(tmp_path)


def test_a_folder_without_manifest_is_no_artifact(tmp_path):
    with pytest.raises(InputError, match=r"no manifest\.json"):
        read_artifact(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        read_artifact(tmp_path / "nothing")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_without_permission_is_explained(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot be used as a store"):
        Store(tmp_path / "s")
