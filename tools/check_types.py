"""Check the types of the whole project with mypy.

Type checkers do not read setuptools' `package-dir`, so build/types/smelt contains links to smelt/ and to the
folders that are mapped into it (`smelt.compress`, ...). mypy checks that tree, and editors find it by
`[tool.pyright]`; `--link` only creates it. mypy also succeeds without any files, so the number of files that
it reports is compared with the number of files in the project.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "types"
CHECKED_BESIDE = ("tools", "benchmarks")


def link_tree(packages: dict[str, str]) -> None:
    """Create `TREE`, in which smelt/ contains its own files and folders and the mapped ones.

    Args:
        packages: setuptools' `package-dir`, dotted package name to source folder.
    """
    shutil.rmtree(TREE, ignore_errors=True)
    (TREE / "smelt").mkdir(parents=True)
    links = {path.name: path for path in (ROOT / packages["smelt"]).iterdir()}
    links |= {name.rpartition(".")[2]: ROOT / folder for name, folder in packages.items() if name != "smelt"}
    for name, source in links.items():
        (TREE / "smelt" / name).symlink_to(source)


def main(arguments: list[str]) -> int:
    """Run mypy; return its exit status, or 1 if it did not check every file."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = settings["tool"]["setuptools"]["package-dir"]
    link_tree(packages)
    if arguments == ["--link"]:
        return 0
    other_files = [str(path) for folder in CHECKED_BESIDE for path in sorted((ROOT / folder).rglob("*.py"))]
    expected = sum(len(list((ROOT / folder).rglob("*.py"))) for folder in packages.values()) + len(
        other_files
    )
    command = [sys.executable, "-m", "mypy", "--no-pretty", *arguments, str(TREE), *other_files]
    result = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
    print(result.stdout, end="")
    checked = re.search(r"(?:in|checked) (\d+) source files?", result.stdout)
    if checked is None or int(checked[1]) != expected:
        got = checked[1] if checked else "an unknown number of"
        print(f"mypy checked {got} files, the project has {expected}. See build/types.", file=sys.stderr)
        return 1
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
