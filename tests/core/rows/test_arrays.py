"""Arrays are read without unpickling, and what is wrong with a file is known from its headers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.core.rows.arrays import read_arrays, shapes_in


def write(path: Path, **values: Any) -> Path:
    np.savez(path, **values)
    return path


def test_rows_are_those_of_axis_0(tmp_path: Path) -> None:
    found = read_arrays(
        write(tmp_path / "a.npz", x=np.ones((3, 2)), t=np.array(["a", "b", "c"]), k=np.array(1))
    )
    assert found.rows == 3
    assert {name: v.shape for name, v in found.values.items()} == {"x": (3, 2), "t": (3,), "k": ()}
    assert shapes_in(tmp_path / "a.npz")["t"].dtype == "str"
    assert found.some([2, 0]).values["t"].tolist() == ["c", "a"]


def test_equal_rows_have_one_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    one, other = (read_arrays(write(tmp_path / n, x=np.ones((3, 2)))) for n in ("a.npz", "b.npz"))
    assert one.fingerprint == other.fingerprint
    assert one.some([0, 1]).fingerprint != one.fingerprint
    assert read_arrays(write(tmp_path / "c.npz", x=np.ones((2, 3)))).fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"x": np.ones((3, 2)), "y": np.ones(4)}, "x has 3, y has 4"),
        ({"x": np.ones((0, 2))}, "no rows in this file"),
        ({"x": np.array([{}, {}], dtype=object)}, "holds objects of Python, which are never unpickled"),
        ({}, "no arrays in this file"),
    ],
)
def test_files_that_hold_no_rows_are_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_arrays(write(tmp_path / "a.npz", **values))


def test_what_is_no_such_file_is_said(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.npz", x=np.ones((30, 20))).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[:500])
    for name, said in (
        ("cut.npz", "not an .npz file"),
        ("b.npz", "Did you mean 'a.npz'"),
        ("a.csv", "no such file"),
    ):
        with pytest.raises(InputError, match=said):
            read_arrays(tmp_path / name)
    (tmp_path / "rows.csv").write_text("x\n1\n")
    with pytest.raises(InputError, match=r"expected an \.npz file"):
        read_arrays(tmp_path / "rows.csv")


def test_more_than_the_memory_holds_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.npz", x=np.ones((300, 20)))
    monkeypatch.setattr("smelt.core.memory.available_bytes", lambda: 1000)
    monkeypatch.setattr(np, "load", lambda *a, **k: pytest.fail("read"))
    with pytest.raises(InputError, match="Write fewer rows"):
        read_arrays(path)
