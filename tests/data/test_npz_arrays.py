"""Arrays are read without unpickling, and what is wrong with a file is known from its headers."""

import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.data.npz_arrays import read_npz, read_npz_headers, write_npz
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def write(path: Path, **values: Any) -> Path:
    np.savez(path, **values)
    return path


def test_npz_rows_are_axis_0(tmp_path: Path) -> None:
    arrays = read_npz(
        write(tmp_path / "a.npz", x=np.ones((3, 2)), t=np.array(["a", "b", "c"]), k=np.array(1))
    )
    assert arrays.num_samples == 3
    assert {name: v.shape for name, v in arrays.values.items()} == {"x": (3, 2), "t": (3,), "k": ()}
    assert read_npz_headers(tmp_path / "a.npz")["t"].dtype == "str"
    assert arrays.select([2, 0]).values["t"].tolist() == ["c", "a"]


def test_equal_arrays_have_equal_fingerprints_in_any_file(tmp_path: Path) -> None:
    first, other = (read_npz(write(tmp_path / n, x=np.ones((3, 2)))) for n in ("a.npz", "b.npz"))
    assert first.fingerprint == other.fingerprint
    assert first.select([0, 1]).fingerprint != first.fingerprint
    assert read_npz(write(tmp_path / "c.npz", x=np.ones((2, 3)))).fingerprint != first.fingerprint


@pytest.mark.parametrize(("values", "code", "names"), [
    ({"x": np.ones((3, 2)), "y": np.ones(4)}, "unequal-rows", "x y"),
    ({"x": np.ones((0, 2))}, "empty-data", ""),
    ({"x": np.array([{}, {}], dtype=object)}, "pickled-objects", "'x'"), ({}, "missing-array", ""),
])  # fmt: skip
def test_files_without_rows_are_rejected(
    tmp_path: Path, values: dict[str, Any], code: str, names: str
) -> None:
    path = write(tmp_path / "a.npz", **values)
    with raises_code(code, InputError) as excinfo:
        read_npz(path)
    assert excinfo.value.file == str(path)
    assert all(name in str(excinfo.value) for name in names.split())


def test_invalid_npz_files_are_explained(tmp_path: Path) -> None:
    content = write(tmp_path / "a.npz", x=np.ones((30, 20))).read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[:500])
    for name, code, nearest in (
        ("cut.npz", "damaged-file", ""),
        ("b.npz", "missing-file", "'a.npz'"),
        ("a.csv", "missing-file", ""),
    ):
        with raises_code(code, InputError) as excinfo:
            read_npz(tmp_path / name)
        assert excinfo.value.file == str(tmp_path / name)
        assert nearest in str(excinfo.value)
    (tmp_path / "rows.csv").write_text("x\n1\n")
    with raises_code("wrong-format", InputError):
        read_npz(tmp_path / "rows.csv")


def test_arrays_exceeding_memory_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.npz", x=np.ones((300, 20)))
    monkeypatch.setattr("smelt.core.system.available_bytes", lambda: 1000)
    monkeypatch.setattr(np.lib.format, "read_array", lambda *a, **k: pytest.fail("read"))
    with raises_code("out-of-memory", InputError):
        read_npz(path)


def header(text: str, length: int | None = None) -> bytes:
    """What an array begins with, whatever it says of itself."""
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text) if length is None else length) + text.encode()


WHOLE = header("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2)}\n") + bytes(8)


@pytest.mark.parametrize("content", [
    header("(" * 5000 + "\n"),  # tokenize.TokenError
    header("-" * 5000 + "1\n"),  # RecursionError
    header("{'descr': '<f4', 'fortran_order': False, 'shape': (True, 8)}\n") + bytes(32),  # TypeError
    header("{'descr': '<f4', 'fortran_order': False, 'shape': (-5, 8)}\n") + bytes(160),
    b"\x93NUMPY\x09\x00aaaa",
])  # fmt: skip
def test_invalid_npy_header_is_damaged_file(tmp_path: Path, content: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x.npy", content)
    with raises_code("damaged-file", InputError):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("packed", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_compressed_data_is_damaged_file(tmp_path: Path, packed: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", packed) as file:
        file.writestr("x.npy", WHOLE)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[45:60] = b"\xff" * 15
    (tmp_path / "a.npz").write_bytes(content)
    with raises_code("damaged-file", InputError):
        read_npz(tmp_path / "a.npz")


def test_huge_npy_header_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", header(" " * (1 << 20), 3_000_000_000))
    sizes: list[int] = []
    original = zipfile.ZipExtFile.read

    def counted(stream: Any, n: int | None = -1) -> bytes:
        content = original(stream, n)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(zipfile.ZipExtFile, "read", counted)
    with raises_code("damaged-file", InputError):
        read_npz_headers(tmp_path / "a.npz")
    assert sum(sizes) <= 1 << 16


def test_member_without_npy_suffix_is_ignored(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x.npy", WHOLE)
        file.writestr("x", b"not an array")
    assert read_npz(tmp_path / "a.npz").values["x"].shape == (1, 2)


def test_sample_axis_is_moved_to_front(tmp_path: Path) -> None:
    values = {
        "x": np.ones((3, 2)),
        "state": np.arange(6).reshape(2, 3),
        "same": np.ones(5),
        "label": np.ones(7),
    }
    axes = {"x": 0, "state": 1, "same": None}
    arrays = read_npz(write(tmp_path / "a.npz", **values), axes=axes)
    assert arrays.num_samples == 3
    assert {name: v.shape for name, v in arrays.values.items()} == {
        "x": (3, 2),
        "state": (3, 2),
        "same": (5,),
    }
    some = arrays.select([2])
    np.testing.assert_array_equal(some.values["state"], [[2, 5]])
    assert some.values["same"].shape == (5,)
    assert {name for name in some.values if not some.is_shared(name)} == {"x", "state"}
    assert arrays.padded_to(5).values["state"][3:].tolist() == [[2, 5], [2, 5]]


def test_unequal_row_counts_suggest_axes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.npz", x=np.ones((3, 2)), y=np.ones((3, 1)), state=np.ones((1, 3)), k=np.ones(4)
    )
    with pytest.raises(InputError) as raised:
        read_npz(path, axes={"x": 0, "y": 0, "state": 0})
    assert raised.value.code == "unequal-rows"
    assert "{axes: {state: 1}}" in str(raised.value)
    with raises_code("unequal-rows", InputError):
        read_npz(path, axes={"x": 0, "y": 0, "k": 0})


def test_arrays_are_written_with_any_name(tmp_path: Path) -> None:
    values = {"file": np.ones((2, 2)), "ein/gabe:0": np.array(["a", "bc"], dtype=object)}
    write_npz(tmp_path / "a.npz", values)
    arrays = read_npz(tmp_path / "a.npz").values
    assert arrays["file"].tolist() == [[1, 1], [1, 1]]
    assert arrays["ein/gabe:0"].tolist() == ["a", "bc"]


def test_equal_rows_have_equal_hashes(tmp_path: Path) -> None:
    arrays = read_npz(write(tmp_path / "a.npz", x=np.array([[1, 2], [3, 4], [1, 2]]), k=np.array(1)))
    first, other, third = arrays.sample_hashes
    assert first == third != other
