"""Check the types of the whole project with mypy.

Type checkers do not read setuptools' `package-dir`, so the folders are linked to build/types in the layout of
their import names (`smelt`, `smelt.core`, ...) and mypy checks that tree. mypy also succeeds without any
files, so the number of files that it reports is compared with the number of files in the project.
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
    """Create `TREE`: for each package a folder with links to the files of its source folder.

    Args:
        packages: setuptools' `package-dir`, dotted package name to source folder.
    """
    shutil.rmtree(TREE, ignore_errors=True)
    for name, folder in packages.items():
        for source in sorted((ROOT / folder).rglob("*")):
            if source.suffix not in (".py", ".pyi") and source.name != "py.typed":
                continue
            link = TREE.joinpath(*name.split(".")) / source.relative_to(ROOT / folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)


def main(arguments: list[str]) -> int:
    """Run mypy; return its exit status, or 1 if it did not check every file."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    link_tree(settings["tool"]["setuptools"]["package-dir"])
    beside = [str(path) for folder in CHECKED_BESIDE for path in sorted((ROOT / folder).rglob("*.py"))]
    expected = len(list(TREE.rglob("*.py"))) + len(beside)
    command = [sys.executable, "-m", "mypy", "--no-pretty", *arguments, str(TREE), *beside]
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
