"""Reading recipes: defaults, errors with their lines, `--set`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smelt.core.errors import InputError
from smelt.core.messages import Message
from smelt.data.tasks import ALL_TASKS
from smelt.pipeline.recipe.recipe import (
    METRICS_BY_TASK,
    DataSettings,
    GateSettings,
    ParsedRecipe,
    RecipeKeys,
    ScoreSettings,
    find_recipe,
)
from tests.support.expected_errors import message_locations, raises_code
from tests.support.parsed_recipes import parse_recipe

pytestmark = pytest.mark.quick

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
GOOD = """\
model: m
task: translation
data: {test: t.jsonl}
stages:
  - prune: {keep_ratio: 0.5}
    name: small
  - onnx
  - onnx: {target: tensorrt}
    from: small
    optional: true
"""


def read(text: str, *overrides: str) -> ParsedRecipe:
    return parse_recipe(text, Path("recipe.yaml"), overrides)


def errors(text: str, *overrides: str) -> list[Message]:
    with pytest.raises(InputError) as excinfo:
        read(text, *overrides)
    assert excinfo.value.exit_code == 2
    assert str(excinfo.value).splitlines() == [str(error) for error in excinfo.value.messages]
    return list(excinfo.value.messages)


def test_recipe_defaults() -> None:
    recipe = read(GOOD)
    assert recipe.score.quality == ("bleu", "chrf", "rouge1", "rouge2", "rougeL")
    generation = recipe.score.generation.model_dump()
    assert {name for name, value in generation.items() if value is not None} == {"num_beams", "do_sample"}
    assert (generation["num_beams"], generation["do_sample"]) == (1, False)
    assert recipe.score.batch_size == 32
    assert recipe.score.latency is not None
    assert (recipe.baseline, recipe.seed, recipe.truncation, recipe.threads) == ("model", 0, "warn", None)
    assert recipe.data.split_sources() == {"test": "t.jsonl"}
    assert recipe.base == Path()


def test_metric_settings_are_read_and_checked() -> None:
    recipe = read(GOOD + "\nscore: {quality: [{bleu: {tokenize: zh}}, chrf]}\n")
    assert recipe.score.quality == ("bleu", "chrf")
    assert recipe.metric_settings == {"bleu": {"tokenize": "zh"}}
    assert read(GOOD).metric_settings == {}
    for metric, code, setting in (
        ("{bleu: {tokenize: zhh}}", "wrong-value", ".bleu.tokenize"),
        ("{bleu: {lower: true}}", "unknown-setting", ".bleu.lower"),
        ("{chrf: {tokenize: zh}}", "unknown-setting", ".chrf.tokenize"),
        ("{bleu: zh}", "wrong-value", ".bleu"),
    ):
        messages = errors(GOOD + f"\nscore: {{quality: [{metric}]}}\n")
        assert [(message.code, message.setting) for message in messages] == [
            (code, f"score.quality[0]{setting}")
        ]


def test_stages_are_read_with_name_parent_and_optional() -> None:
    first, second, third = read(GOOD).stages
    assert (first.stage, first.name, first.settings, first.line) == ("prune", "small", {"keep_ratio": 0.5}, 5)
    assert (second.stage, second.name, second.settings, second.optional) == ("onnx", None, {}, False)
    assert (third.parent, third.optional) == ("small", True)


def test_latency_false_disables_latency() -> None:
    assert read(GOOD + "score: {latency: false}").score.latency is None


def test_classifier_metrics_are_unset_until_model_is_known() -> None:
    recipe = read("model: m\ntask: text-classification\ndata: {test: t}\nstages: []\n")
    assert recipe.score.quality == ()
    assert "mse" in METRICS_BY_TASK["text-classification"]


def test_empty_file_names_are_rejected() -> None:
    splits = ("train", "unlabeled", "validation", "calibration", "test")
    data = ", ".join(f"{name}: ''" for name in splits)
    text = f"model: {{config: ''}}\ntask: language-modeling\ndata: {{{data}}}\nstages: []\n"
    assert message_locations(errors(text)) == [
        ("empty-text", key, line)
        for line, key in [(1, "model.config"), *((3, f"data.{name}") for name in splits)]
    ]


def test_custom_metric_is_rejected_for_task_without_outputs() -> None:
    text = "model: m\ntask: TASK\ndata: {train: t, test: t}\nstages: []\nscore: {quality: ['own:metric']}\n"
    [error] = errors(text.replace("TASK", "language-modeling"))
    assert error.code == "does-not-fit-task"
    assert "text-generation" in error.message
    assert read(text.replace("TASK", "text-classification")).score.quality == ("own:metric",)


def test_errors_are_reported_together_in_line_order() -> None:
    text = """\
model: m
taks: translation
task: translation
data: {tets: t.jsonl, columns: {source: 3}}
stages:
  - prnue: {keep_ratio: 0.5}
  - prune: {keep_ratio: 0.5}
    nmae: small
score: {quality: [bleu, accuracy, rogueL]}
seed: yes
threads: 0
"""
    messages = errors(text)
    assert message_locations(messages) == [
        ("unknown-setting", "taks", 2),
        ("wrong-value", "data.columns.source", 4),
        ("unknown-setting", "data.tets", 4),
        ("missing-setting", "data.test", 4),
        ("unknown-stage", "stages[0].prnue", 6),
        ("unknown-setting", "stages[1].nmae", 8),
        ("does-not-fit-task", "score.quality[1]", 9),
        ("unknown-metric", "score.quality[2]", 9),
        ("wrong-value", "seed", 10),
        ("wrong-value", "threads", 11),
    ]
    assert {message.file for message in messages} == {"recipe.yaml"}
    # what is known there, and the nearest of it
    keys = (
        "model, task, tokenizer, shapes, data, embedding, score, baseline, gates, seed, truncation, threads,"
    )
    splits = "train, unlabeled, validation, calibration, test, split, streaming, max_samples, buffer_size,"
    stages = "finetune, distill, trim-vocabulary, drop-layers, drop-experts, prune, sparsify, factorize,"
    for message, names, nearest in (
        (messages[0], keys, "task"),
        (messages[2], splits, "test"),
        (messages[4], stages, "prune"),
        (messages[5], "name, from, optional", "name"),
        (messages[7], "bleu, chrf, rouge1, rouge2, rougeL", "rougeL"),
    ):
        assert names in message.message
        assert f"'{nearest}'?" in message.message


@pytest.mark.parametrize(("line", "code", "setting", "named"), [
    ("seed: 1.5", "wrong-value", "seed", ("0 and 4294967295", "1.5")),
    ("truncation: 1", "wrong-value", "truncation", ("1",)),
    ("baseline: [model]", "wrong-value", "baseline", ('["model"]',)),
    ("score: 3", "wrong-value", "score", ("quality, generation, latency, batch_size", "3")),
    ("score: {quality: bleu}", "wrong-value", "score.quality", ("'bleu'",)),
    ("score: {quality: [bleu, bleu]}", "duplicate-metric", "score.quality[1]", ("'bleu'",)),
    ("score: {generation: {num_beams: 0}}", "wrong-value", "score.generation.num_beams", ("1 and 64", "0")),
    ("score: {generation: {num_beams: 4, early_stopping: nevr}}", "wrong-value",
     "score.generation.early_stopping", ("'nevr'", "'never'?")),
    ("score: {generation: {temperature: 0.7}}", "unused-setting", "score.generation",
     ("temperature", "do_sample: true")),
    ("score: {latency: {batch_sizes: [0]}}", "wrong-value", "score.latency.batch_sizes",
     ("1 to 4096", "[0]")),
    ("score: {batch_size: '8'}", "wrong-value", "score.batch_size", ("1 and 4096", "'8'")),
    ("gates: {bleu: {max_degradation: -1}}", "wrong-value", "gates.bleu.max_degradation", ("-1",)),
    ("gates: {size_bytes: {max: 8MB}}", "wrong-value", "gates.size_bytes.max", ("of bytes", "8MB")),
    ("gates: {bleu: {max: 3}}", "does-not-fit-metric", "gates.bleu.max", ("max_degradation or min",)),
    ("gates: {bleu: {max_degradation: 1, confidence: 95}}", "wrong-value", "gates.bleu.confidence",
     ("0.5 and 0.999", "95")),
    ("gates: {size_bytes: {max: 9, confidence: 0.9}}", "does-not-fit-metric", "gates.size_bytes.confidence",
     ()),
    ("gates: {operations: {max: 9, confidence: 0.9}}", "does-not-fit-metric", "gates.operations.confidence",
     ()),
    ("gates: {operations: {min: 9}}", "does-not-fit-metric", "gates.operations.min", ("max",)),
    ("gates: {bleu: {}}", "missing-setting", "gates.bleu", ("max_degradation or min",)),
    ("gates: {blue: {min: 3}}", "unknown-metric", "gates.blue",
     ("'blue'", "bleu, chrf, rouge1, rouge2, rougeL, speedup, cpu_speedup, size_bytes, operations",
      "'bleu'?")),
    ("score: {quality: [comet]}", "unknown-metric", "score.quality[0]", ("'comet'", "pickle", "bertscore")),
    ("seed: 1\nseed: 2", "duplicate-key", "seed", ("line 11",)),
])  # fmt: skip
def test_invalid_values_are_explained(line: str, code: str, setting: str, named: tuple[str, ...]) -> None:
    number = 11 + line.count("\n")
    [error] = errors(GOOD + line)
    assert message_locations([error]) == [(code, setting, number)]
    assert [value for value in named if value not in error.message] == []


def test_gates_require_measured_metrics() -> None:
    text = "score: {quality: [bleu], latency: false}\ngates:\n  speedup: {min: 3}\n  chrf: {min: 1}\n"
    messages = errors(GOOD + text)
    assert message_locations(messages) == [
        ("settings-conflict", "gates.speedup", 13),
        ("metric-not-scored", "gates.chrf", 14),
    ]
    assert "bleu, speedup, cpu_speedup, size_bytes" in messages[1].message


@pytest.mark.parametrize(("stage", "code", "setting", "read"), [
    ("{}", "wrong-value", "stages[0]", "{}"), ("3", "wrong-value", "stages[0]", "3"),
    ("{prune: {}, onnx: {}}", "several-stages", "stages[0]", "2: prune, onnx"),
    ("{prune: {}, keep_ratio: 0.5}", "unknown-setting", "stages[0].keep_ratio", "prune"),
    ("{prune: 0.5}", "wrong-value", "stages[0].prune", "0.5"),
    ("{prune: {}, from: 3}", "wrong-value", "stages[0].from", "3"),
    ("{prune: {}, optional: 'yes'}", "wrong-value", "stages[0].optional", "'yes'"),
    ("{prune: {}, name: a/b}", "wrong-value", "stages[0].name", "'a/b'"),
    ("{prune: {}, name: model}", "reserved-name", "stages[0].name", "'model'"),
])  # fmt: skip
def test_invalid_stages_are_explained(stage: str, code: str, setting: str, read: str) -> None:
    text = f"model: m\ntask: translation\ndata: {{test: t}}\nstages:\n  - {stage}\n"
    [error] = errors(text)
    assert message_locations([error]) == [(code, setting, 5)]
    assert read in error.message


def test_unsupported_task_is_rejected() -> None:
    [error] = errors(GOOD.replace("translation", "translatoin"))
    assert message_locations([error]) == [("unknown-task", "task", 2)]
    for value in ("'translatoin'", ", ".join(ALL_TASKS), "'translation'?"):
        assert value in error.message


@pytest.mark.parametrize(("text", "shown"), [("", "an empty file"), ("- a", '["a"]'), ("hello", "'hello'")])
def test_non_mapping_recipe_is_rejected(text: str, shown: str) -> None:
    with raises_code("not-a-recipe", InputError) as excinfo:
        read(text)
    assert (excinfo.value.file, excinfo.value.line) == ("recipe.yaml", 1)
    assert shown in str(excinfo.value)


def test_missing_keys_are_named() -> None:
    assert [(message.code, message.setting) for message in errors("seed: 1")] == [
        ("missing-setting", name) for name in ("model", "task", "data", "stages")
    ]


def test_set_changes_step_settings_and_keys() -> None:
    recipe = read(
        GOOD,
        "small.keep_ratio=0.9",
        "seed=3",
        "score.latency.threads=2",
        "onnx.target=ort-cpu",
        "onnx-2.optional=false",
    )
    assert recipe.stages[0].settings == {"keep_ratio": 0.9}
    assert recipe.stages[1].settings == {"target": "ort-cpu"}
    assert recipe.stages[2].optional is False
    assert recipe.seed == 3
    assert recipe.score.latency is not None
    assert recipe.score.latency.threads == 2
    assert recipe.document["stages"][0]["prune"] == {"keep_ratio": 0.9}


def test_set_disables_and_enables_latency() -> None:
    assert read(GOOD, "score.latency=false").score.latency is None
    latency = read(GOOD + "score: {latency: false}", "score.latency.rounds=7").score.latency
    assert latency is not None
    assert latency.rounds == 7


@pytest.mark.parametrize(("override", "code", "setting"), [
    ("seed", "invalid-override", "--set seed"),
    ("smal.keep_ratio=1", "unknown-setting", "--set smal.keep_ratio=1"),
    ("small=1", "missing-setting", "--set small=1"), ("seed=x", "wrong-value", "seed"),
    ("seed=[", "invalid-yaml", "--set seed=["), ("seed=.inf", "not-finite", "--set seed=.inf"),
    ("small.optional=3", "wrong-value", "stages[0].optional"),
])  # fmt: skip
def test_invalid_overrides_are_explained(override: str, code: str, setting: str) -> None:
    [error] = errors(GOOD, override)
    assert message_locations([error]) == [(code, setting, None)]
    assert error.message.startswith(f"--set {override}:")


@pytest.mark.parametrize("written", [".nan", ".inf", "-.inf", "1e999"])
def test_non_finite_number_is_reported_once(written: str) -> None:
    """What stands in its place (0) is not what was written, and may be wrong too."""
    text = GOOD + f"score: {{latency: {{rounds: {written}}}}}"
    code = "number-too-large" if written == "1e999" else "not-finite"
    [error] = errors(text)
    assert message_locations([error]) == [(code, "score.latency.rounds", 11)]
    assert written in error.message
    # one that is given in its place is judged as any other
    assert message_locations(errors(text, "score.latency.rounds=0")) == [
        (code, "score.latency.rounds", 11),
        ("wrong-value", "score.latency.rounds", None),
    ]


def test_set_suggests_nearest_step() -> None:
    assert "'small'?" in errors(GOOD, "smal.keep_ratio=1")[0].message


def test_find_recipe_suggests_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "translate.yaml").touch()
    assert find_recipe(str(tmp_path / "translate.yaml")) == tmp_path / "translate.yaml"
    with raises_code("unknown-recipe", InputError) as excinfo:
        find_recipe(str(tmp_path / "transalte.yaml"))
    assert "'translate.yaml'?" in str(excinfo.value)


def test_folder_is_rejected_as_recipe_and_init_is_suggested_for_model(tmp_path: Path) -> None:
    with raises_code("not-a-recipe", InputError) as excinfo:
        find_recipe(str(tmp_path))
    assert "smelt init" not in str(excinfo.value)
    (tmp_path / "config.json").touch()
    with raises_code("not-a-recipe", InputError) as excinfo:
        find_recipe(str(tmp_path))
    assert f"`smelt init {tmp_path}`" in str(excinfo.value)


_BESIDE = "stages prune onnx name from optional batch_sizes beams bleu speedup keep"
_KEYS = {
    **RecipeKeys.model_fields, **ScoreSettings.model_fields, **DataSettings.model_fields,
    **GateSettings.model_fields,
}  # fmt: skip
_WORDS = st.sampled_from([*_KEYS, *_BESIDE.split(" ")])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=15,
)
_SETS = st.lists(st.tuples(st.lists(_WORDS, min_size=1, max_size=3), _WORDS), max_size=2)


@settings(FUZZ)
@given(st.dictionaries(_WORDS, _VALUES, max_size=6), _SETS)
def test_any_structure_is_recipe_or_raises_input_error(
    value: dict[str, object], sets: list[tuple[list[str], str]]
) -> None:
    from smelt.pipeline.recipe.yaml_file import dump_yaml

    base = {"model": "m", "task": "translation", "data": {"test": "t"}, "stages": [{"prune": {}}]}
    overrides = [f"{'.'.join(address)}={value_text}" for address, value_text in sets]
    message = "recipe.yaml:"
    try:
        read(dump_yaml(base | value), *overrides)
    except InputError as error:
        message = str(error)
    assert all(line.startswith(("recipe.yaml:", "--set ")) for line in message.split("\n"))
