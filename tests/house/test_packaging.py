"""The wheel holds what the tree holds.

A file that setup.py leaves out works in an editable install and is missing there.
"""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS = {folder: name for name, folder in SETUPTOOLS["package-dir"].items()}
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


def dotted(path: Path) -> str:
    """The import name of a folder below one of the mapped ones: compress/prune -> smelt.compress.prune."""
    first, *rest = path.relative_to(ROOT).parts
    return ".".join([FOLDERS[first], *rest])


def packed_name(path: Path) -> str:
    """The name in a wheel: folders without an __init__.py hold data of the package above them."""
    package = next(parent for parent in path.parents if (parent / "__init__.py").is_file())
    return f"{dotted(package).replace('.', '/')}/{path.relative_to(package).as_posix()}"


def source_files() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in files if "__pycache__" not in path.parts and path.suffix != ".pyc")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_names(lines: list[str]) -> set[str]:
    return {canonical(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}


def test_every_folder_with_python_is_package() -> None:
    files = [path for path in source_files() if path.suffix == ".py"]
    folders = {folder for path in files for folder in path.parents if ROOT in folder.parents}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize(
    ("package", "pattern"),
    [(package, pattern) for package, patterns in SETUPTOOLS["package-data"].items() for pattern in patterns],
)
def test_package_data_pattern_matches_file(package: str, pattern: str) -> None:
    folder = next(p.parent for p in source_files() if p.name == "__init__.py" and dotted(p.parent) == package)
    assert [path for path in folder.glob(pattern) if path.is_file()], f"{pattern} matches nothing in {folder}"


def test_wheel_has_every_source_file(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {packed_name(path) for path in source_files()}
    assert packed == expected


def test_constraints_pin_every_direct_dependency() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", CONSTRAINTS, flags=re.M))
    direct = requirement_names(PROJECT["project"]["dependencies"])
    direct |= requirement_names(PROJECT["project"]["optional-dependencies"]["dev"])
    assert direct - {canonical(name) for name in pinned} == set()
    assert pinned["torch"] == "2.13.0"
    assert pinned["onnxruntime-gpu"] == pinned["onnxruntime"]


def test_no_conftest_or_init_shadows_other_packages() -> None:
    forbidden = [ROOT / "conftest.py", *(ROOT / "tests").rglob("conftest.py")]
    helpers = ROOT / "tests" / "support"  # the only package of the tests
    packages = {path.parent for path in (ROOT / "tests").rglob("__init__.py")} - {ROOT / "tests"}
    assert [path for path in forbidden if path.exists()] == []
    assert [path for path in packages if not path.is_relative_to(helpers)] == []
