"""How long a text the engines of a recipe are built for."""

import pytest

from smelt.core.errors import InputError
from smelt.pipeline.inspect import machine
from smelt.pipeline.plan.load_plan import load_plan
from tests.support.expected_errors import message_locations, raises_code
from tests.support.models import tiny

RECIPE = """
model: m
task: translation
data: {{validation: data.jsonl, test: data.jsonl}}
stages:
  - onnx: {{target: tensorrt}}
  - tensorrt: {engine}
    optional: true
score: {{quality: [bleu], generation: {score}}}
"""


@pytest.fixture
def home(tmp_path):
    tiny.write_marian(tmp_path / "m")
    tiny.write_pairs(tmp_path / "data.jsonl", 4)
    return tmp_path


def _longest(home, engine, score):
    (home / "recipe.yaml").write_text(RECIPE.format(engine=engine, score=score))
    return load_plan(home / "recipe.yaml").step("tensorrt").settings.max_new_tokens


def test_engine_length_is_at_least_longest_scored_output(home):
    assert _longest(home, "{}", "{max_new_tokens: 300}") == 300
    assert _longest(home, "{max_new_tokens: 400}", "{max_new_tokens: 300}") == 400


def test_engine_length_is_unset_without_settings(home):
    assert _longest(home, "{}", "{}") is None
    assert _longest(home, "{max_new_tokens: 50}", "{}") == 50


def test_engine_shorter_than_scoring_is_rejected(home):
    with raises_code("engine-too-short", InputError) as excinfo:
        _longest(home, "{max_new_tokens: 50}", "{max_new_tokens: 300}")
    assert message_locations(excinfo.value.messages) == [
        ("engine-too-short", "stages[1].tensorrt.max_new_tokens", 7)
    ]
    assert all(number in str(excinfo.value) for number in ("50", "300"))


PROVIDER = RECIPE.replace("{{target: tensorrt}}", "{engine}").replace(
    "\n  - tensorrt: {engine}\n    optional: true", ""
)


def _longest_of_provider(home, engine, score):
    text = f"{{target: ort-tensorrt{engine and f', engine: {engine}'}}}"
    (home / "recipe.yaml").write_text(PROVIDER.format(engine=text, score=score))
    engine = load_plan(home / "recipe.yaml").step("onnx").settings.engine
    return engine and engine.max_new_tokens


def test_ort_engine_length_follows_scoring(home):
    assert _longest_of_provider(home, "", "{max_new_tokens: 300}") == 300
    assert _longest_of_provider(home, "{max_batch_size: 2}", "{max_new_tokens: 300}") == 300
    assert _longest_of_provider(home, "{max_new_tokens: 400}", "{max_new_tokens: 300}") == 400
    assert _longest_of_provider(home, "", "{}") is None
    with raises_code("engine-too-short", InputError) as excinfo:
        _longest_of_provider(home, "{max_new_tokens: 50}", "{max_new_tokens: 300}")
    assert message_locations(excinfo.value.messages) == [
        ("engine-too-short", "stages[0].onnx.engine.max_new_tokens", 6)
    ]
    assert all(number in str(excinfo.value) for number in ("50", "300"))


@pytest.mark.parametrize("lack", ["needs TensorRT 10; here is 11: pip install it.", None])
def test_ort_provider_graph_is_scored_only_if_provider_works(home, monkeypatch, lack):
    monkeypatch.setattr(machine, "missing_requirement", lambda: lack)
    (home / "recipe.yaml").write_text(
        PROVIDER.format(engine="{target: ort-tensorrt, dtype: fp16}", score="{}")
    )
    plan = load_plan(home / "recipe.yaml")
    step = plan.step("onnx")
    assert step.unavailable is None
    plan.require_runnable()
    if lack is None:
        assert step.unscored is None
    else:
        assert step.unscored.startswith(lack)
        assert f"not scored: {lack}" in " ".join(str(plan).split())


def test_schemes_unsupported_by_tensorrt_are_rejected_for_ort_tensorrt(home):
    recipe = PROVIDER.replace("  - onnx", "  - quantize: {{scheme: SCHEME}}\n  - onnx").format(
        engine="{target: ort-tensorrt}", score="{}"
    )
    (home / "recipe.yaml").write_text(recipe.replace("SCHEME", "int8-dynamic"))
    with raises_code("unsupported-scheme", InputError) as excinfo:
        load_plan(home / "recipe.yaml")
    assert [message.setting for message in excinfo.value.messages] == ["stages[1].onnx.target"]
    static = recipe.replace("SCHEME", "int8-static, activations_symmetric: true").replace(
        "validation:", "calibration: data.jsonl, validation:"
    )
    (home / "recipe.yaml").write_text(static)
    assert load_plan(home / "recipe.yaml").step("onnx").settings.target == "ort-tensorrt"


@pytest.mark.parametrize(("engine", "expected", "codes"), [
    ("", 4, []), (", num_beams: 8", 8, []), (", num_beams: 2", 2, ["engine-has-fewer-beams"]),
])  # fmt: skip
def test_engines_take_the_beams_of_the_scores(home, engine, expected, codes):
    text = PROVIDER.format(
        engine=f"{{target: ort-tensorrt, engine: {{max_batch_size: 2{engine}}}}}",
        score="{num_beams: 4}",
    )
    (home / "recipe.yaml").write_text(text)
    plan = load_plan(home / "recipe.yaml")
    assert plan.step("onnx").settings.engine.num_beams == expected
    assert [m.code for m in plan.warnings if m.code == "engine-has-fewer-beams"] == codes
