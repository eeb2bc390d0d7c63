"""Packages are carried in parts, joined, and unzipped where the machine lacks them."""

import zipfile

import gpu_packages
import pytest

pytestmark = pytest.mark.quick


def write_wheel(folder, name, version="1.0", requires=(), files=None):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = "\n".join([f"Name: {name}", *(f"Requires-Dist: {line}" for line in requires)])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {f"{name}.py": "x = 1\n" * 300, **(files or {})}.items():
            archive.writestr(file, text)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata + "\n\n")
    return path


@pytest.fixture
def carried(tmp_path, monkeypatch):
    """Return a function that carries wheels in parts of 1 kB, and returns the files of `site` afterwards."""
    monkeypatch.setattr(gpu_packages, "PART_BYTES", 1000)
    parts, site = tmp_path / "parts", tmp_path / "site"
    parts.mkdir()
    site.mkdir()

    def carry(wheels, lost=()):
        gpu_packages.write_parts(wheels, parts)
        assert all(path.stat().st_size <= 1000 for path in parts.glob("*.part-*"))
        for name in lost:
            (parts / name).unlink()
        packs = gpu_packages.unpack(parts, site)
        return packs, {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}

    return carry


def test_only_missing_or_outdated_packages_are_unzipped(carried, tmp_path):
    """numpy is here in a version that the carried smelt allows, pytest in one that it does not."""
    wheels = [
        write_wheel(tmp_path, "smelt", requires=["numpy>=1", "pytest>=999; python_version >= '3'"]),
        write_wheel(tmp_path, "numpy"), write_wheel(tmp_path, "pytest"), write_wheel(tmp_path, "nobody_has"),
    ]  # fmt: skip
    packs, files = carried(wheels)
    assert packs == ["base", "onnxruntime"]
    assert {name for name in files if name.endswith(".py")} == {"smelt.py", "pytest.py", "nobody_has.py"}


def test_incomplete_pack_is_left_out_and_the_other_is_unzipped(carried, tmp_path):
    large = write_wheel(tmp_path, "onnxruntime_gpu", "999.0")
    packs, files = carried([write_wheel(tmp_path, "smelt"), large], lost=["onnxruntime.part-0"])
    assert packs == ["base"]
    assert "smelt.py" in files
    assert "onnxruntime_gpu.py" not in files


def test_files_of_a_wheel_are_placed_as_pip_places_them(carried, tmp_path):
    more = {
        "nobody_has-1.0.data/purelib/inner/module.py": "", "nobody_has-1.0.data/scripts/tool": "",
        "../outside.py": "",
    }  # fmt: skip
    _, files = carried([write_wheel(tmp_path, "nobody_has", files=more)])
    assert "inner/module.py" in files
    assert not any("tool" in name for name in files)
    assert not (tmp_path / "outside.py").exists()


def test_carried_packages_are_requirements_of_smelt_without_torch():
    versions = gpu_packages.required_packages(["smelt"])
    assert {"smelt", "pydantic", "onnxruntime-gpu", "tokenizers"} >= {"smelt"} <= versions.keys()
    assert {"pydantic-core", "numpy"} <= versions.keys()
    assert versions.keys().isdisjoint({"torch", "transformers"})
