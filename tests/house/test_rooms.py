"""A newcomer finds the room by its folder's name, and sees what is in it at a glance."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("core", "families", "runtime", "compress", "export", "evaluate", "pipeline")
MOST = 15
"""Entries of a folder: files of Python and folders with some, `__init__.py` not counted."""
LISTS = {"families": "a file a family of models, beside the few that say what a family is"}
OF_NO_FOLDER = {"pipeline/whole": "runs of whole recipes", "pipeline/faults": "what goes wrong around a run"}


def entries(folder: Path) -> list[str]:
    """What a reader of `folder` has to choose among."""
    files = [path for path in folder.iterdir() if path.suffix == ".py" and path.name != "__init__.py"]
    folders = [path for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    return sorted(path.name for path in [*files, *folders])


def rooms(top: Path) -> list[Path]:
    """The folders with Python at and below `top`."""
    return sorted({path.parent for path in top.rglob("*.py")} | {top})


def name_of(folder: Path) -> str:
    return folder.relative_to(ROOT).as_posix()


def excess(folder: Path) -> str:
    """What to say of a folder with too many entries; nothing where it has not."""
    found = entries(folder)
    if len(found) <= MOST:
        return ""
    return f"{len(found)} entries, at most {MOST}; give some of them a room of their own: {', '.join(found)}"


ROOMS = [room for layer in LAYERS for room in rooms(ROOT / layer)]


@pytest.mark.parametrize("folder", [room for room in ROOMS if name_of(room) not in LISTS], ids=name_of)
def test_no_folder_is_a_heap(folder: Path) -> None:
    assert excess(folder) == ""


def test_a_room_and_a_file_beside_it_have_different_names() -> None:
    """`from smelt.core import store` would otherwise be one or the other."""
    both = [
        f"{name_of(folder)}/{name}"
        for folder in ROOMS
        for name in entries(folder)
        if f"{name}.py" in entries(folder)
    ]
    assert both == []


def test_folders_of_tests_are_those_of_the_source() -> None:
    strange = [
        folder.relative_to(ROOT / "tests").as_posix()
        for layer in LAYERS
        if (ROOT / "tests" / layer).is_dir()
        for folder in rooms(ROOT / "tests" / layer)
        if not (ROOT / folder.relative_to(ROOT / "tests")).is_dir()
    ]
    assert sorted(strange) == sorted(OF_NO_FOLDER)


def test_a_heap_is_found(tmp_path: Path) -> None:
    for number in range(MOST):
        (tmp_path / f"file_{number}.py").touch()
    (tmp_path / "__init__.py").touch()
    (tmp_path / "page.md").touch()
    (tmp_path / "pictures").mkdir()
    assert excess(tmp_path) == ""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").touch()
    assert excess(tmp_path).startswith(f"{MOST + 1} entries")
