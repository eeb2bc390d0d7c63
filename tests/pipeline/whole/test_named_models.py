"""Teachers and students of a folder, of every kind of task: they teach and learn in a run, or are refused."""

import json
import shutil

import harness
import images
import pytest
import sentences
import tiny

import smelt

TASKS = {
    "image-classification": (images.model, images.rows),
    "sentence-similarity": (sentences.embedder, sentences.rows),
    "text-classification": (tiny.bert, lambda path: tiny.labelled(path, 8)),
    "translation": (tiny.marian, lambda path: tiny.pairs(path, 8)),
}


def home(folder, task, setting):
    make, rows = TASKS[task]
    for name in ("m", "other"):
        make(folder / name)
    rows(folder / "data.jsonl")
    (folder / "recipe.yaml").write_text(
        f"model: m\ntask: {task}\ndata: {{train: data.jsonl, validation: data.jsonl, test: data.jsonl}}\n"
        f"stages: [{{distill: {{{setting}, max_steps: 1, batch_size: 4, evals: 1}}}}]\n"
        "score: {latency: false}\n"
    )
    return folder / "recipe.yaml"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("setting", ["teacher: {model: other}", "student: {model: other}"])
def test_a_model_of_a_folder_teaches_and_learns(task, setting, tmp_path):
    report = smelt.run(home(tmp_path, task, setting), out=tmp_path / "run").report
    assert [step["status"] for step in report["steps"]] == ["done", "done"], report["steps"][-1]["error"]


@pytest.mark.parametrize("setting", ["teacher: {model: other}", "student: {model: other}"])
def test_of_models_of_images_nobody_asks_for_a_processor_but_of_the_first(setting, tmp_path):
    recipe = home(tmp_path, "image-classification", setting)
    (tmp_path / "other" / "preprocessor_config.json").unlink()
    assert harness.smelt("plan", recipe).exit_code == 0
    result = harness.smelt("run", recipe, "--out", tmp_path / "run", "--quiet")
    assert result.exit_code == 0, result.output


def test_a_teacher_of_vectors_makes_them_as_its_own_folder_says(tmp_path):
    recipe = home(tmp_path, "sentence-similarity", "teacher: {model: other}")
    shutil.rmtree(tmp_path / "other")
    sentences.embedder(tmp_path / "other", rules=False)  # then as the model's
    assert smelt.run(recipe, out=tmp_path / "run").exit_code == 0


def test_a_bare_encoder_teaches_no_classifier(tmp_path):
    recipe = home(tmp_path, "text-classification", "teacher: {model: other}")
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["BertModel"]}))
    said = harness.smelt("plan", recipe, code=2).output
    assert f"{tmp_path / 'other'}: its model has no classifier, so it cannot teach one." in said


def test_a_student_of_another_family_is_refused_once(tmp_path):
    recipe = home(tmp_path, "text-classification", "student: {model: other}")
    shutil.rmtree(tmp_path / "other")
    tiny.marian(tmp_path / "other")
    said = harness.smelt("plan", recipe, code=2).output
    assert said.count("recipe.yaml:4:") == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("teacher: {model: ''}", "distill.teacher.model: expected a text that is not empty, read ''."),
        ("student: {model: ''}", "distill.student.model: expected a text that is not empty, read ''."),
        ("teacher: {folder: other}", "distill.teacher.model: missing."),
    ],
)
def test_a_name_that_names_nothing_is_no_folder(setting, message, tmp_path):
    said = harness.smelt("plan", home(tmp_path, "translation", setting), code=2).output
    assert message in said, said


@pytest.mark.parametrize("place", ["teacher: {model: ~/other}", "student: {model: ~/other}"])
def test_a_folder_may_lie_in_the_home_of_the_user(place, tmp_path, monkeypatch):
    recipe = home(tmp_path / "recipes", "text-classification", place)
    (tmp_path / "recipes" / "other").rename(tmp_path / "other")
    (tmp_path / "recipes" / "data.jsonl").rename(tmp_path / "data.jsonl")
    recipe.write_text(recipe.read_text().replace("data.jsonl", "~/data.jsonl"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert harness.smelt("plan", recipe, code=0)
    assert smelt.run(recipe, out=tmp_path / "run").exit_code == 0
