"""Folders for work in progress are removed by the next run if their process was killed."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from smelt.core import workspaces
from smelt.core.store import Store
from smelt.core.workspaces import temporary_workspace


@pytest.fixture
def temporary_files(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_temporary_folder_of_killed_process_is_removed_by_next_run(temporary_files, tmp_path):
    code = (
        "import os, signal\n"
        "from smelt.core.workspaces import temporary_workspace\n"
        "with temporary_workspace() as folder:\n"
        "    (folder / 'x').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    (parent,) = temporary_files.iterdir()
    assert len(list(parent.iterdir())) == 2  # the folder and its marker
    with temporary_workspace() as folder:
        Store(tmp_path / "s")
        assert sorted(parent.iterdir()) == [folder, folder.with_name(f"{folder.name}.owner")]
    assert list(parent.iterdir()) == []


def test_temporary_folder_of_other_user_is_not_used(temporary_files, monkeypatch):
    with temporary_workspace() as folder:
        parent = folder.parent
    monkeypatch.setattr(workspaces.os, "getuid", lambda: os.stat(parent).st_uid + 1)
    foreign_folder = workspaces._temporary_parent()
    foreign_folder.mkdir()
    with temporary_workspace() as folder:
        assert (folder.is_dir(), folder.parent) == (True, temporary_files)


def test_cleanup_of_temporary_folders_follows_no_links(temporary_files, tmp_path):
    """Everybody can write to the system's folder of temporary files, also a link with this user's name."""
    document = tmp_path / "home" / "thesis" / "chapter"
    document.mkdir(parents=True)
    os.utime(document.parent, (0, 0))
    os.utime(document, (0, 0))
    workspaces._temporary_parent().symlink_to(document.parent.parent, target_is_directory=True)
    Store(tmp_path / "s")
    with temporary_workspace() as folder:
        assert (document.is_dir(), folder.parent) == (True, temporary_files)
