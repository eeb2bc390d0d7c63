"""Whatever stands in structure.json, it is read or refused in words."""

import contextlib
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smelt.core.errors import InputError
from smelt.models.edits import read_edits
from tests.support.expected_errors import raises_code

KEYS = st.just("edits") | st.text(max_size=3)
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.just("edits"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=6,
)
FUZZ = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()))
def test_random_files_are_read_or_rejected(tmp_path, content):
    (tmp_path / "structure.json").write_bytes(content)
    with contextlib.suppress(InputError):
        assert all(isinstance(edit, dict) for edit in read_edits(tmp_path))


def test_deeply_nested_file_is_rejected(tmp_path):
    (tmp_path / "structure.json").write_text('{"edits": ' + "[" * 100_000)
    with raises_code("damaged-file", InputError):
        read_edits(tmp_path)
