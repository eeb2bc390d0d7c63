"""Reading recipes: defaults, mistakes with their lines, `--set`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from smelt.core.data import EVERY_TASK
from smelt.core.errors import InputError
from smelt.recipe import errors
from smelt.recipe.recipe import (
    METRICS,
    Data,
    Gate,
    Recipe,
    RecipeKeys,
    ScoreSettings,
    find_recipe,
    parse_recipe,
    read_recipe,
)

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
GOOD = """\
model: m
task: translation
data: {test: t.jsonl}
stages:
  - prune: {keep: 0.5}
    name: small
  - onnx
  - onnx: {target: tensorrt}
    from: small
    optional: true
"""


def read(text: str, *overrides: str) -> Recipe:
    return parse_recipe(text, Path("recipe.yaml"), overrides)


def mistakes(text: str, *overrides: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(text, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_words_for_mistakes_are_made_where_there_are_some_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema takes longer than all other checks of a recipe."""
    made: list[object] = []
    real = TypeAdapter.json_schema
    monkeypatch.setattr(TypeAdapter, "json_schema", lambda self: made.append(self) or real(self))
    errors._schema_of.cache_clear()
    read(GOOD)
    assert made == []
    wrong = GOOD + "score: {batch_size: many}\n"
    first = mistakes(wrong)
    before = len(made)
    assert before > 0
    assert mistakes(wrong) == first
    assert len(made) == before


def test_defaults() -> None:
    recipe = read(GOOD)
    assert recipe.score.quality == METRICS["translation"]
    generation = recipe.score.generation.model_dump()
    assert {name for name, value in generation.items() if value is not None} == {"beams", "do_sample"}
    assert (generation["beams"], generation["do_sample"]) == (1, False)
    assert recipe.score.batch_size == 32
    assert recipe.score.latency is not None
    assert (recipe.baseline, recipe.seed, recipe.strict, recipe.threads) == ("model", 0, False, None)
    assert recipe.data.splits() == {"test": "t.jsonl"}
    assert recipe.base == Path()


def test_a_metric_may_have_settings() -> None:
    recipe = read(GOOD + "\nscore: {quality: [{bleu: {tokenize: zh}}, chrf]}\n")
    assert (recipe.score.quality, recipe.tokenize) == (("bleu", "chrf"), "zh")
    assert read(GOOD).tokenize is None
    for entry in ("{bleu: {tokenize: zhh}}", "{bleu: {lower: true}}", "{chrf: {tokenize: zh}}", "{bleu: zh}"):
        [mistake] = mistakes(GOOD + f"\nscore: {{quality: [{entry}]}}\n")
        assert "score.quality[0]" in mistake


def test_stages_are_read_with_what_stands_beside_them() -> None:
    first, second, third = read(GOOD).stages
    assert (first.word, first.name, first.settings, first.line) == ("prune", "small", {"keep": 0.5}, 5)
    assert (second.word, second.name, second.settings, second.optional) == ("onnx", None, {}, False)
    assert (third.parent, third.optional) == ("small", True)


def test_latency_false_turns_it_off() -> None:
    assert read(GOOD + "score: {latency: false}").score.latency is None


def test_the_metrics_of_a_classifier_wait_for_its_model_and_data() -> None:
    recipe = read("model: m\ntask: text-classification\ndata: {test: t}\nstages: []\n")
    assert recipe.score.quality == ()
    assert "mse" in METRICS["text-classification"]


def test_files_without_a_name_are_told_so() -> None:
    splits = ("train", "unlabelled", "validation", "calibration", "test")
    data = ", ".join(f"{name}: ''" for name in splits)
    text = f"model: {{config: ''}}\ntask: language-modeling\ndata: {{{data}}}\nstages: []\n"
    assert mistakes(text) == [
        f"recipe.yaml:{line}: {key}: expected a text that is not empty, read ''."
        for line, key in [(1, "model.config"), *((3, f"data.{name}") for name in splits)]
    ]


def test_several_mistakes_are_reported_together_in_the_order_of_their_lines() -> None:
    text = """\
model: m
taks: translation
task: translation
data: {tets: t.jsonl, columns: {source: 3}}
stages:
  - prnue: {keep: 0.5}
  - prune: {keep: 0.5}
    nmae: small
score: {quality: [bleu, accuracy, rogueL]}
seed: yes
threads: 0
"""
    assert mistakes(text) == [
        "recipe.yaml:2: taks: unknown key. Known: model, task, tokenizer, data, embedding, score, baseline,"
        " gates, seed, strict, threads, device, stages. Did you mean 'task'?",
        "recipe.yaml:4: data.columns.source: expected a text, read 3.",
        "recipe.yaml:4: data.tets: unknown; known here: train, unlabelled, validation, calibration, test,"
        " split, columns, windows, prefix, source_language, target_language. Did you mean 'test'?",
        "recipe.yaml:4: data.test: missing; expected a file or a hub id.",
        "recipe.yaml:6: stages[0].prnue: unknown stage 'prnue'. Known: finetune, distill, vocabulary,"
        " depth, prune, sparsify, factorize, share, shortlist, quantize, onnx, simplify, quantize-graph,"
        " fp16, tensorrt. Did you mean 'prune'?",
        "recipe.yaml:8: stages[1].nmae: unknown; known beside a stage: name, from, optional."
        " Did you mean 'name'?",
        "recipe.yaml:9: score.quality[1]: 'accuracy' belongs to text-classification. Known for translation:"
        " bleu, chrf, rouge1, rouge2, rougeL.",
        "recipe.yaml:9: score.quality[2]: 'rogueL' is no metric. Known for translation: bleu, chrf, rouge1,"
        " rouge2, rougeL. Did you mean 'rougeL'?",
        "recipe.yaml:10: seed: expected a whole number between 0 and 4294967295, read 'yes'.",
        "recipe.yaml:11: threads: expected a whole number between 1 and 1024, read 0.",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed: 1.5", "seed: expected a whole number between 0 and 4294967295, read 1.5."),
        ("strict: 1", "strict: expected true or false, read 1."),
        ("baseline: [model]", 'baseline: expected a text, read ["model"].'),
        ("score: 3", "score: expected a mapping with quality, generation, latency, batch_size, read 3."),
        ("score: {quality: bleu}", "score.quality: expected a list (each a text), read 'bleu'."),
        ("score: {quality: [bleu, bleu]}", "score.quality[1]: 'bleu' is named twice."),
        (
            "score: {generation: {beams: 0}}",
            "score.generation.beams: expected a whole number between 1 and 64, read 0.",
        ),
        (
            "score: {generation: {beams: 4, early_stopping: nevr}}",
            "score.generation.early_stopping: expected true or false or 'never', read 'nevr'."
            " Did you mean 'never'?",
        ),
        (
            "score: {generation: {temperature: 0.7}}",
            "score.generation: temperature means nothing without do_sample: true.",
        ),
        (
            "score: {latency: {batch_sizes: [0]}}",
            "score.latency.batch_sizes: expected different whole numbers from 1 to 4096, read [0].",
        ),
        (
            "score: {batch_size: '8'}",
            "score.batch_size: expected a whole number between 1 and 4096, read '8'.",
        ),
        ("gates: {bleu: {max_drop: -1}}", "gates.bleu.max_drop: expected a number of at least 0, read -1."),
        ("gates: {bleu: {max: 3}}", "gates.bleu.max: does not fit 'bleu', which takes max_drop or min."),
        (
            "gates: {bleu: {max_drop: 1, confidence: 95}}",
            "gates.bleu.confidence: expected a number between 0.5 and 0.999, read 95.",
        ),
        (
            "gates: {size_bytes: {max: 9, confidence: 0.9}}",
            "gates.size_bytes.confidence: a size is exact: there is no interval to judge; leave it out.",
        ),
        ("gates: {bleu: {}}", "gates.bleu: no limit; give max_drop or min, for example {max_drop: 1.0}."),
        (
            "gates: {blue: {min: 3}}",
            "gates.blue: 'blue' is nothing that has a gate. Known: bleu, chrf, rouge1, rouge2, rougeL, speedup, cpu_speedup,"  # noqa: E501
            " size_bytes. Did you mean 'bleu'?",
        ),
        ("seed: 1\nseed: 2", "seed: this key is given twice, first in line 11. Keep one."),
    ],
)
def test_wrong_values_are_explained(line: str, message: str) -> None:
    number = 11 + line.count("\n")
    assert mistakes(GOOD + line) == [f"recipe.yaml:{number}: {message}"]


def test_gates_need_what_they_judge_to_be_measured() -> None:
    text = "score: {quality: [bleu], latency: false}\ngates:\n  speedup: {min: 3}\n  chrf: {min: 1}\n"
    assert mistakes(GOOD + text) == [
        "recipe.yaml:13: gates.speedup: there is no speedup without latency; remove `latency: false` or this gate.",  # noqa: E501
        "recipe.yaml:14: gates.chrf: 'chrf' is not measured; add it to score.quality."
        " Known: bleu, speedup, cpu_speedup, size_bytes.",
    ]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("{}", "stages[0]: expected a stage such as `prune: {keep: 0.5}`, read {}."),
        ("3", "stages[0]: expected a stage such as `prune: {keep: 0.5}`, read 3."),
        (
            "{prune: {}, onnx: {}}",
            "stages[0]: expected one stage, read 2: prune, onnx. Start each with a dash.",
        ),
        (
            "{prune: {}, keep: 0.5}",
            "stages[0].keep: unknown; known beside a stage: name, from, optional."
            " If it is a setting of prune, indent it more.",
        ),
        ("{prune: 0.5}", "stages[0].prune: expected a mapping of settings, read 0.5."),
        ("{prune: {}, from: 3}", "stages[0].from: expected the name of an earlier step, read 3."),
        ("{prune: {}, optional: 'yes'}", "stages[0].optional: expected true or false, read 'yes'."),
        (
            "{prune: {}, name: a/b}",
            "stages[0].name: expected a name of letters, digits, - and _, read 'a/b'.",
        ),
        ("{prune: {}, name: model}", "stages[0].name: 'model' is a word of recipes. Choose another name."),
    ],
)
def test_wrong_stages_are_explained(stage: str, message: str) -> None:
    text = f"model: m\ntask: translation\ndata: {{test: t}}\nstages:\n  - {stage}\n"
    assert mistakes(text) == [f"recipe.yaml:5: {message}"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "translatoin",
            f"unknown task 'translatoin'. Supported: {', '.join(EVERY_TASK)}. Did you mean 'translation'?",
        ),
    ],
)
def test_tasks_that_are_not_supported(task: str, message: str) -> None:
    [found] = mistakes(GOOD.replace("translation", task))
    assert found.startswith(f"recipe.yaml:2: task: {message}")


@pytest.mark.parametrize(("text", "shown"), [("", "an empty file"), ("- a", '["a"]'), ("hello", "'hello'")])
def test_what_is_no_mapping_is_no_recipe(text: str, shown: str) -> None:
    [found] = mistakes(text)
    assert found.endswith(f"expected a recipe with the keys model, task, data and stages, read {shown}.")


def test_missing_keys_are_named() -> None:
    found = mistakes("seed: 1")
    assert [line.split(": ")[1] for line in found] == ["model", "task", "data", "stages"]


def test_set_changes_settings_of_steps_and_keys() -> None:
    recipe = read(
        GOOD,
        "small.keep=0.9",
        "seed=3",
        "score.latency.threads=2",
        "onnx.target=ort-cpu",
        "onnx-2.optional=false",
    )
    assert recipe.stages[0].settings == {"keep": 0.9}
    assert recipe.stages[1].settings == {"target": "ort-cpu"}
    assert recipe.stages[2].optional is False
    assert recipe.seed == 3
    assert recipe.score.latency is not None
    assert recipe.score.latency.threads == 2
    assert recipe.document["stages"][0]["prune"] == {"keep": 0.9}


def test_set_latency_false_and_back() -> None:
    assert read(GOOD, "score.latency=false").score.latency is None
    latency = read(GOOD + "score: {latency: false}", "score.latency.rounds=7").score.latency
    assert latency is not None
    assert latency.rounds == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set seed: expected NAME.SETTING=VALUE, for example seed=3 or prune.keep=0.5."),
        ("smal.keep=1", "--set smal.keep=1: no key or step 'smal'."),
        ("small=1", "--set small=1: which setting of 'small'? Write small.SETTING=VALUE."),
        ("seed=x", "--set seed=x: seed: expected a whole number between 0 and 4294967295, read 'x'."),
        ("seed=[", "--set seed=[:1: not valid YAML"),
        ("seed=.inf", "--set seed=.inf: expected a finite number, read .inf."),
        ("small.optional=3", "--set small.optional=3: stages[0].optional: expected true or false, read 3."),
    ],
)
def test_wrong_overrides_are_explained(override: str, message: str) -> None:
    [found] = mistakes(GOOD, override)
    assert found.startswith(message)


@pytest.mark.parametrize("written", [".nan", ".inf", "-.inf", "1e999"])
def test_a_number_that_is_none_is_said_once(written: str) -> None:
    """What stands in its place (0) is not what was written, and may be wrong too."""
    text = GOOD + f"score: {{latency: {{rounds: {written}}}}}"
    [found] = mistakes(text)
    assert "score.latency.rounds: " in found
    assert written in found
    # one that is given in its place is judged as any other
    [_, found] = mistakes(text, "score.latency.rounds=0")
    assert found.startswith("--set score.latency.rounds=0: score.latency.rounds: expected a whole number")


def test_set_names_the_nearest_step() -> None:
    assert mistakes(GOOD, "smal.keep=1")[0].endswith("Did you mean 'small'?")


def test_read_recipe_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(GOOD)
    assert read_recipe(path).base == tmp_path


def test_find_recipe_names_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "translate.yaml").touch()
    assert find_recipe(str(tmp_path / "translate.yaml")) == tmp_path / "translate.yaml"
    with pytest.raises(InputError, match=r"no such recipe: .* Did you mean 'translate\.yaml'\?"):
        find_recipe(str(tmp_path / "transalte.yaml"))


def test_a_folder_is_no_recipe_and_one_with_a_model_gets_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r": a folder, and not a recipe, which is a YAML file\.$"):
        find_recipe(str(tmp_path))
    (tmp_path / "config.json").touch()
    with pytest.raises(InputError, match=r"`smelt init .*` writes one for the model in it\.$"):
        find_recipe(str(tmp_path))


@settings(FUZZ)
@given(st.text(), st.lists(st.text(max_size=20), max_size=2))
def test_any_text_is_a_recipe_or_an_input_error(text: str, overrides: list[str]) -> None:
    # anything but an InputError ends the test
    with contextlib.suppress(InputError):
        assert read(text, *overrides).task in METRICS


_BESIDE = "stages prune onnx name from optional batch_sizes beams bleu speedup keep"
_KEYS = {**RecipeKeys.model_fields, **ScoreSettings.model_fields, **Data.model_fields, **Gate.model_fields}
_WORDS = st.sampled_from([*_KEYS, *_BESIDE.split(" ")])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=15,
)
_SETS = st.lists(st.tuples(st.lists(_WORDS, min_size=1, max_size=3), _WORDS), max_size=2)


@settings(FUZZ)
@given(st.dictionaries(_WORDS, _VALUES, max_size=6), _SETS)
def test_any_structure_is_a_recipe_or_an_input_error(
    value: dict[str, object], sets: list[tuple[list[str], str]]
) -> None:
    import yaml

    base = {"model": "m", "task": "translation", "data": {"test": "t"}, "stages": [{"prune": {}}]}
    overrides = [f"{'.'.join(address)}={word}" for address, word in sets]
    found = "recipe.yaml:"
    try:
        read(yaml.safe_dump(base | value), *overrides)
    except InputError as error:
        found = str(error)
    assert all(line.startswith(("recipe.yaml:", "--set ")) for line in found.split("\n"))
