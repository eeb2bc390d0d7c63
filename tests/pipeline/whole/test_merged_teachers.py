"""Whole recipes: classifiers of cats and of fruit teach one student, which tells all classes apart."""

import json

import pytest

import smelt
from smelt.data.labels import SINGLE_LABEL
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.models import images, tiny
from tests.support.untrained_recipes import BERT

TEACHERS = {"cats": ["cat", "dog"], "fruit": ["apple", "banana"]}
LABELS = ["apple", "banana", "cat", "dog"]  # sorted, as of a new classifier
SPLITS = "{train: data.jsonl, validation: data.jsonl, test: data.jsonl}"


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write_models(folder, write):
    """Write the two teachers, and an encoder without a classifier as `m`."""
    for seed, (name, labels) in enumerate(TEACHERS.items(), 1):
        write(folder / name, seed)
        change_config(
            folder / name, id2label=dict(enumerate(labels)), label2id={n: i for i, n in enumerate(labels)}
        )
    write(folder / "m", 0)
    model_class = json.loads((folder / "m/config.json").read_text())["architectures"][0]
    change_config(folder / "m", architectures=[model_class.partition("For")[0] + "Model"])


def write_texts(folder, labels=LABELS):
    lines = [{"text": text, "label": labels[i % len(labels)]} for i, text in enumerate(tiny.SENTENCES)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_text_home(folder, labels=LABELS):
    write_models(folder, lambda path, seed: tiny.write_bert(path, seed=seed))
    write_texts(folder, labels)
    (folder / "texts.txt").write_text("\n".join(tiny.SENTENCES))
    (folder / "small.json").write_text(json.dumps(BERT | {"num_hidden_layers": 1}))
    return folder


def write_recipe(folder, settings="", *, model="m", task="text-classification", data=SPLITS):
    (folder / "recipe.yaml").write_text(
        f"model: {model}\ntask: {task}\ndata: {data}\nscore: {{latency: false}}\nstages:\n"
        f"  - distill: {{teacher: [{{model: cats}}, {{model: fruit}}], max_steps: 2, batch_size: 4,"
        f" num_evals: 1{settings}}}\n"
    )
    return folder / "recipe.yaml"


def check_student(folder, recipe):
    assert harness.smelt("plan", recipe).exit_code == 0
    report = smelt.run(recipe, out=folder / "run").report
    step = report["steps"][-1]
    assert step["status"] == "done", step["error"]
    config = json.loads((folder / "run/artifacts/distill/config.json").read_text())
    assert sorted(config["id2label"].values()) == LABELS
    assert config.get("problem_type") in (None, SINGLE_LABEL)
    accuracy = step["quality"]["accuracy"]
    assert accuracy["n"] == len((folder / "data.jsonl").read_text().splitlines())


@pytest.mark.parametrize("settings", [
    "", ", student: {layers: 1}", ", student: {config: small.json}",
    ", student: {config: small.json}, cache_logits: {}",
])  # fmt: skip
def test_classifiers_of_texts_teach_one_class_of_all(settings, tmp_path):
    check_student(tmp_path, write_recipe(write_text_home(tmp_path), settings))


def test_untrained_model_of_recipe_learns_classes_of_all_teachers(tmp_path):
    recipe = write_recipe(write_text_home(tmp_path), model="{config: small.json, tokenizer: m}")
    check_student(tmp_path, recipe)


def test_unlabeled_texts_teach_one_class_of_all(tmp_path):
    recipe = write_recipe(
        write_text_home(tmp_path), ", train_on: unlabeled, losses: {logits: 1, labels: 0}",
        data="{unlabeled: texts.txt, validation: data.jsonl, test: data.jsonl}",
    )  # fmt: skip
    check_student(tmp_path, recipe)


def test_classifiers_of_images_teach_one_class_of_all(tmp_path):
    write_models(tmp_path, lambda path, seed: images.write_model(path, num_labels=2))
    images.write_rows(tmp_path / "data.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"label": LABELS[i % 4]}) for i, row in enumerate(rows)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    check_student(tmp_path, write_recipe(tmp_path, task="image-classification"))


@pytest.mark.parametrize(("labels", "code"), [
    ([*LABELS, "cow"], "untaught-labels"), (["cat", "dog", "apple"], "labels-mismatch"),
])  # fmt: skip
def test_plan_rejects_labels_that_run_would_reject(labels, code, tmp_path):
    recipe = write_recipe(write_text_home(tmp_path, labels))
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert [(message.code, message.setting) for message in error.messages] == [
        (code, "stages[0].distill.teacher")
    ]


def swap_tokens(folder):
    """Exchange the last two tokens of the vocabulary of a model."""
    tokens = (folder / "vocab.txt").read_text().splitlines()
    (folder / "vocab.txt").write_text("\n".join([*tokens[:-2], tokens[-1], tokens[-2]]) + "\n")


@pytest.mark.parametrize("model", [
    "m", "{config: small.json, tokenizer: m}",
    "{config: small.json, tokenizer: {train: wordpiece, vocab_size: 60}}",  # compared with the first teacher
])  # fmt: skip
def test_plan_rejects_teacher_with_other_token_ids(model, tmp_path):
    recipe = write_recipe(write_text_home(tmp_path), model=model)
    harness.smelt("plan", recipe, code=0)
    swap_tokens(tmp_path / "fruit")
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert [(message.code, message.setting) for message in error.messages] == [
        ("tokenizer-mismatch", "stages[0].distill.teacher[1].model")
    ]


def test_plan_compares_no_token_ids_after_trim_vocabulary(tmp_path):
    recipe = write_recipe(write_text_home(tmp_path))
    swap_tokens(tmp_path / "fruit")
    text = recipe.read_text().replace("stages:\n", "stages:\n  - trim-vocabulary: {}\n")
    recipe.write_text(text)
    harness.smelt("plan", recipe, code=0)


def test_plan_rejects_multi_label_teacher_of_single_label_student(tmp_path):
    recipe = write_recipe(write_text_home(tmp_path))
    change_config(tmp_path / "fruit", problem_type="multi_label_classification")
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert [message.code for message in error.messages] == ["single-label-student"]


def test_plan_rejects_unlabeled_texts_where_some_labels_are_not_linked(tmp_path):
    recipe = write_recipe(
        write_text_home(tmp_path, [*LABELS, "cow"]), ", train_on: unlabeled, losses: {logits: 1, labels: 0}",
        data="{unlabeled: texts.txt, validation: data.jsonl, test: data.jsonl}",
    )  # fmt: skip
    tiny.write_bert(tmp_path / "cows", seed=3)
    change_config(tmp_path / "cows", id2label={0: "cow", 1: "dog"}, label2id={"cow": 0, "dog": 1})
    recipe.write_text(recipe.read_text().replace("{model: fruit}", "{model: fruit}, {model: cows}"))
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert [message.code for message in error.messages] == ["unlinked-labels"]
