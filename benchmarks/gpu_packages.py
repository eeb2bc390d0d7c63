"""Carry packages to a machine without network, in files of at most 60 MB; see gpu.sh.

`pack` writes build/gpu/parts: the wheels of smelt, of what it needs besides torch and transformers, and of
the tests. They are two packs, `base` and `onnxruntime`, each a tar file in parts, and index.json with the
parts' hashes. `unpack` joins the packs whose parts are all there, and unzips into build/gpu/site the wheels
that the machine's Python lacks or has in a version that smelt does not allow. No pip is needed there.

    python benchmarks/gpu_packages.py pack [--python 3.12]
    python benchmarks/gpu_packages.py unpack          prints the folder for PYTHONPATH
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "gpu"
PARTS, SITE = FOLDER / "parts", FOLDER / "site"
PART_BYTES = 60 * 10**6
ON_MACHINE = {"torch", "transformers"}
WANTED = ("smelt", "pytest", "pytest-xdist", "hypothesis", "babel")
LARGE = "onnxruntime-gpu"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")


def required_packages(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed packages that `names` need, but for those of `ON_MACHINE`."""
    versions: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in versions or name in ON_MACHINE:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        versions[name] = distribution.version
        waiting += [each.name for each in _requirements(distribution.requires)]
    return versions


def _requirements(lines: Iterable[str] | None) -> list[Requirement]:
    """Return the requirements that apply here, without extras."""
    requirements = [Requirement(line) for line in lines or ()]
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def pack(python: str) -> None:
    """Write `PARTS` for a Python version such as 3.12."""
    PARTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder)
        _pip("wheel", "--no-deps", "--wheel-dir", folder, str(ROOT))
        for name, version in required_packages(WANTED).items():
            if name != "smelt":
                _fetch_wheel(f"{name}=={version}", folder, python)
        write_parts(sorted(wheels.glob("*.whl")), PARTS)


def _fetch_wheel(requirement: str, folder: str, python: str) -> None:
    platforms = [argument for name in _PLATFORMS for argument in ("--platform", name)]
    binary = ("--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms)
    try:
        _pip("download", "--no-deps", "--dest", folder, *binary, requirement)
    except subprocess.CalledProcessError:  # there is its source only, and it is pure Python
        _pip("wheel", "--no-deps", "--wheel-dir", folder, requirement)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True, capture_output=True)


def write_parts(wheels: Sequence[Path], folder: Path) -> None:
    """Write the packs of `wheels` into `folder`, in parts, and their index."""
    index: dict[str, dict[str, str]] = {}
    for old in folder.glob("*.part-*"):
        old.unlink()
    for name in ("base", "onnxruntime"):
        is_large = name != "base"
        index[name] = {}
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for wheel in wheels:
                    if (canonicalize_name(parse_wheel_filename(wheel.name)[0]) == LARGE) == is_large:
                        tar.add(wheel, wheel.name)
            file.seek(0)
            while data := file.read(PART_BYTES):
                part = folder / f"{name}.part-{len(index[name])}"
                part.write_bytes(data)
                index[name][part.name] = hashlib.sha256(data).hexdigest()
    (folder / "index.json").write_text(json.dumps(index, indent=1))


def unpack(parts: Path, site: Path) -> list[str]:
    """Unzip the carried wheels that this machine needs into `site`; return the names of complete packs."""
    index = json.loads((parts / "index.json").read_text())
    complete = [name for name, files in index.items() if _is_complete(parts, files)]
    with tempfile.TemporaryDirectory() as folder:
        for name in complete:
            joined = Path(folder) / "joined.tar"
            joined.write_bytes(b"".join((parts / part).read_bytes() for part in index[name]))
            with tarfile.open(joined) as tar:
                tar.extractall(folder, filter="data")
        wheels = {str(parse_wheel_filename(path.name)[0]): path for path in Path(folder).glob("*.whl")}
        allowed = _allowed_versions(wheels)
        for name, path in wheels.items():
            if name == "smelt" or not _is_installed(name, allowed.get(name)):
                unzip(path, site)
    return complete


def _is_complete(parts: Path, files: dict[str, str]) -> bool:
    return all(
        (parts / name).is_file() and hashlib.sha256((parts / name).read_bytes()).hexdigest() == value
        for name, value in files.items()
    )


def _allowed_versions(wheels: dict[str, Path]) -> dict[str, Requirement]:
    """Return what smelt itself requires, by package."""
    if "smelt" not in wheels:
        return {}
    with zipfile.ZipFile(wheels["smelt"]) as archive:
        path = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(path).decode().split("\n\n")[0].splitlines()
    prefix = "Requires-Dist: "
    requires = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return {canonicalize_name(each.name): each for each in _requirements(requires)}


def _is_installed(name: str, requirement: Requirement | None) -> bool:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement is None or requirement.specifier.contains(version, prereleases=True)


def unzip(wheel: Path, site: Path) -> None:
    """Unzip a wheel as pip installs it, without its scripts: https://packaging.python.org/specifications."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            head, _, rest = name.partition("/")
            target = name
            if head.endswith(".data"):
                kind, _, target = rest.partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
            if name.endswith("/") or not (site / target).resolve().is_relative_to(site.resolve()):
                continue
            (site / target).parent.mkdir(parents=True, exist_ok=True)
            (site / target).write_bytes(archive.read(name))


def main() -> None:
    """Pack here, or unpack there."""
    parser = argparse.ArgumentParser(description="Carry packages to a machine without network.")
    parser.add_argument("verb", choices=("pack", "unpack"))
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    options = parser.parse_args()
    if options.verb == "pack":
        pack(options.python)
        for path in sorted(PARTS.iterdir()):
            print(f"{path.stat().st_size / 1e6:7.1f} MB  {path.relative_to(ROOT)}")
        return
    done = FOLDER / "unpacked.json"
    content = (PARTS / "index.json").read_text() if (PARTS / "index.json").is_file() else ""
    if content:
        present = [content, sorted(path.name for path in PARTS.iterdir())]
        if not done.is_file() or json.loads(done.read_text()) != present:
            print("unpacked:", ", ".join(unpack(PARTS, SITE)) or "no pack is complete", file=sys.stderr)
            done.write_text(json.dumps(present))
    print(SITE)


if __name__ == "__main__":
    main()
