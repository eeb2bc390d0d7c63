"""Whatever stands in a manifest, reading it gives an artifact or says what is wrong."""

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smelt.core.artifact import Manifest, read_artifact
from smelt.core.errors import InputError
from smelt.core.files import hashed_content
from smelt.core.store import Store

KEY = "ab" * 32
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["w.json", "../w.json", "/etc/passwd", "", ".", "a/../../b", "x\0y", "a" * 300, "d", "\ud800", "C:\\x"]
)
RECORD = st.fixed_dictionaries({"sha256": st.text(max_size=5), "size_bytes": st.integers()}) | JSON
FUZZ = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store"))
    with store.workspace() as space:
        (space / "out" / "d").mkdir(parents=True)
        (space / "out" / "w.json").write_text("weights")
        manifest = Manifest(
            key=KEY,
            format="torch",
            task="translation",
            stage="x",
            settings={},
            seed=0,
            parent=None,
            versions={},
        )
        return store.commit(space / "out", manifest).path


@pytest.fixture(scope="module")
def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def _read(folder, content):
    with contextlib.suppress(ValueError, TypeError, RecursionError):  # so that more than the hash is checked
        content = json.dumps(hashed_content(json.loads(content))).encode()
    (folder / "manifest.json").write_bytes(content)
    # anything but an InputError ends the test
    with contextlib.suppress(InputError):
        artifact = read_artifact(folder)
        artifact.verify()
        assert artifact.size_bytes >= 0
        return artifact
    with contextlib.suppress(InputError):
        Store(folder.parents[1]).find(KEY)
    return None


def test_valid_manifest_is_read(folder, manifest):
    assert _read(folder, json.dumps(manifest).encode()) is not None


@FUZZ
@given(st.dictionaries(st.sampled_from([*Manifest.model_fields, "more"]), JSON, min_size=1, max_size=3))
def test_odd_values_are_read_or_rejected(folder, manifest, changes):
    _read(folder, json.dumps(manifest | changes).encode())


@FUZZ
@given(st.dictionaries(NAMES, RECORD, max_size=3))
def test_odd_file_entries_are_rejected_outside_folder(folder, manifest, files):
    artifact = _read(folder, json.dumps(manifest | {"files": files}).encode())
    if artifact is not None:
        assert set(artifact.manifest.files) <= {"w.json"}


@FUZZ
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_odd_bytes_are_rejected(folder, content):
    assert _read(folder, content) is None


@FUZZ
@given(st.data())
def test_mutated_manifest_is_read_or_rejected(folder, manifest, data):
    content = bytearray(json.dumps(manifest).encode())
    for index in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[index] = data.draw(st.integers(0, 255))
    _read(folder, bytes(content[: data.draw(st.integers(0, len(content)))]))
