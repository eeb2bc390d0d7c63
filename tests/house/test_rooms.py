"""Folders of tests are those of the source, and no name is a folder and a file at once."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("smelt", "compress", "export", "evaluate")
APART = {"house", "support", "benchmarks", "configs", "."}
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


ROOMS = [room for layer in LAYERS for room in rooms(ROOT / layer)]


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
        name
        for folder in rooms(ROOT / "tests")
        if (name := folder.relative_to(ROOT / "tests").as_posix()).split("/")[0] not in APART
        and not any((top / name).is_dir() for top in (ROOT, ROOT / "smelt"))
    ]
    assert sorted(strange) == sorted(OF_NO_FOLDER)
