"""A recipe that was changed anywhere gives a plan or an InputError, soon."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smelt.core.errors import InputError
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.recipe.stages import STAGE_CLASSES
from tests.support.models import tiny
from tests.support.processes.fuzz import TEXT_RECIPE

PIECES = [
    *(*STAGE_CLASSES, *TEXT_RECIPE.split(), "null", "-1", "1e9", "[]", "{}", ".nan", "&a", "*a", "<<: *a",
        "? ", "|"),
    *("!!python/object:os.system", "'", '"', ":", "- ", "\n", "\t", "\0", "\u202e", "\ud800", "~"),
    *("%YAML 9", "---", "\\", "é", "9" * 400, "a" * 300),
]  # fmt: skip


PIECE = st.sampled_from(PIECES)
CHANGE = st.tuples(st.integers(0, len(TEXT_RECIPE)), st.integers(0, 12), PIECE)
ADDRESS = st.sampled_from(["small.keep", "seed", "x", "score.latency", "data.test", "onnx.from", "."])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    tiny.write_bert(folder / "m")
    tiny.write_labeled(folder / "data.jsonl", 4)
    (folder / "recipe.yaml").write_text(TEXT_RECIPE)
    return folder


def test_unchanged_recipe_is_planned(home):
    assert [step.name for step in load_plan(home / "recipe.yaml").steps] == [
        "small",
        "distill",
        "quantize",
        "onnx",
    ]


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(CHANGE, min_size=1, max_size=4), st.lists(st.tuples(ADDRESS, PIECE), max_size=1))
def test_mutated_recipe_is_planned_or_raises_input_error(home, changes, overrides):
    text = TEXT_RECIPE
    for offset, removed, inserted in changes:
        text = text[:offset] + inserted + text[offset + removed :]
    path = home / "changed.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    # anything but an InputError ends the test
    with contextlib.suppress(InputError):
        assert str(load_plan(path, [f"{name}={value}" for name, value in overrides]))
