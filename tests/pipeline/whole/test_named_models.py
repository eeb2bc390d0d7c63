"""Teachers and students of a folder, of every kind of task: they teach and learn in a run, or are refused."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

import smelt
from tests.support import harness
from tests.support.expected_errors import command_error, message_locations
from tests.support.models import embedders, images, tiny
from tests.support.pairs.matrix import matrix_cells

TASKS = {
    "image-classification": (images.write_model, images.write_rows),
    "sentence-similarity": (embedders.write_embedder, embedders.write_rows),
    "text-classification": (tiny.write_bert, lambda path: tiny.write_labeled(path, 8)),
    "translation": (tiny.write_marian, lambda path: tiny.write_pairs(path, 8)),
}


def home(folder, task, setting):
    make, rows = TASKS[task]
    for name in ("m", "other"):
        make(folder / name)
    rows(folder / "data.jsonl")
    (folder / "recipe.yaml").write_text(
        f"model: m\ntask: {task}\ndata: {{train: data.jsonl, validation: data.jsonl, test: data.jsonl}}\n"
        f"stages: [{{distill: {{{setting}, max_steps: 1, batch_size: 4, num_evals: 1}}}}]\n"
        "score: {latency: false}\n"
    )
    return folder / "recipe.yaml"


@pytest.mark.parametrize(
    ("task", "setting"), matrix_cells(list(TASKS), ["teacher: {model: other}", "student: {model: other}"])
)
def test_teacher_or_student_folder_works(task, setting, tmp_path):
    report = smelt.run(home(tmp_path, task, setting), out=tmp_path / "run").report
    assert [step["status"] for step in report["steps"]] == ["done", "done"], report["steps"][-1]["error"]


@pytest.mark.parametrize("setting", ["teacher: {model: other}", "student: {model: other}"])
def test_only_first_image_model_requires_processor(setting, tmp_path):
    recipe = home(tmp_path, "image-classification", setting)
    (tmp_path / "other" / "preprocessor_config.json").unlink()
    assert harness.smelt("plan", recipe).exit_code == 0
    result = harness.smelt("run", recipe, "--out", tmp_path / "run", "--quiet")
    assert result.exit_code == 0, result.output


def test_embedding_teacher_uses_pooling_of_its_own_folder(tmp_path):
    recipe = home(tmp_path, "sentence-similarity", "teacher: {model: other}")
    shutil.rmtree(tmp_path / "other")
    embedders.write_embedder(tmp_path / "other", rules=False)  # then as the model's
    assert smelt.run(recipe, out=tmp_path / "run").exit_code == 0


def test_bare_encoder_is_rejected_as_teacher_of_classifier(tmp_path):
    recipe = home(tmp_path, "text-classification", "teacher: {model: other}")
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["BertModel"]}))
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert error.code == "no-classifier"
    assert str(tmp_path / "other") in str(error)


def test_student_of_other_family_is_rejected_once(tmp_path):
    recipe = home(tmp_path, "text-classification", "student: {model: other}")
    shutil.rmtree(tmp_path / "other")
    tiny.write_marian(tmp_path / "other")
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert [message.line for message in error.messages] == [4]


@pytest.mark.parametrize(("setting", "code", "field"), [
    ("teacher: {model: ''}", "empty-text", "teacher.model"),
    ("student: {model: ''}", "empty-text", "student.model"),
    ("teacher: {folder: other}", "missing-setting", "teacher.model"),
])  # fmt: skip
def test_unknown_name_is_not_a_folder(setting, code, field, tmp_path):
    error = command_error(harness.smelt("plan", home(tmp_path, "translation", setting), code=2))
    assert (code, f"stages[0].distill.{field}") in [
        (message.code, message.setting) for message in error.messages
    ]


@pytest.mark.parametrize("field", ["teacher: {model: ~/other}", "student: {model: ~/other}"])
def test_folder_below_home_directory_is_accepted(field, tmp_path, monkeypatch):
    recipe = home(tmp_path / "recipes", "text-classification", field)
    (tmp_path / "recipes" / "other").rename(tmp_path / "other")
    (tmp_path / "recipes" / "data.jsonl").rename(tmp_path / "data.jsonl")
    recipe.write_text(recipe.read_text().replace("data.jsonl", "~/data.jsonl"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert harness.smelt("plan", recipe, code=0)
    assert smelt.run(recipe, out=tmp_path / "run").exit_code == 0


def changed(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(("who", "field"), [("teacher", "teacher"), ("student", "student.model")])
def test_models_with_other_image_size_are_rejected_by_plan(who, field, tmp_path):
    recipe = home(tmp_path, "image-classification", f"{who}: {{model: other}}")
    changed(tmp_path / "other", image_size=64)
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert [(message.code, message.setting) for message in error.messages] == [
        ("image-size-mismatch", f"stages[0].distill.{field}")
    ]
    assert "64 pixels" in str(error)


def test_teacher_with_fewer_positions_requires_max_length(tmp_path):
    recipe = home(tmp_path, "text-classification", "teacher: {model: other}")
    shutil.rmtree(tmp_path / "other")
    tiny.write_bert(tmp_path / "other", max_position_embeddings=8)
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert [(message.code, message.setting) for message in error.messages] == [
        ("longer-than-model", "stages[0].distill.teacher")
    ]
    assert "8 positions" in str(error)
    recipe.write_text(recipe.read_text().replace("max_steps: 1", "max_steps: 1, max_length: 8"))
    assert smelt.run(recipe, out=tmp_path / "run").exit_code == 0


@pytest.mark.parametrize("who", ["teacher", "student"])
def test_mismatched_weights_are_reported_under_given_name(who, tmp_path):
    recipe = home(tmp_path, "image-classification", f"{who}: {{model: other}}")
    path = tmp_path / "other" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "position_embeddings" in name)
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    error = smelt.run(recipe, out=tmp_path / "run").report["steps"][-1]["error"]
    assert error["code"] == "shape-mismatch"
    assert f"{tmp_path / 'other'}: " in error["message"]
    assert ".store" not in error["message"]


LONG = "x" * 300


@pytest.mark.parametrize(("setting", "code", "field"), [
    ("teacher: {model: ~no-such-user/x}", "missing-file", "teacher.model"),
    (f"teacher: {{model: {LONG}}}", "missing-file", "teacher.model"),
    (f"student: {{model: {LONG}}}", "missing-file", "student.model"),
    (f"student: {{config: {LONG}}}", "missing-file", "student.config"),
    (f"teacher: {LONG}", "unknown-step", "teacher"),
    ("teacher: [model, ~no-such-user]", "unknown-step", "teacher[1]"),
    ("teacher: [model, {model: nowhere}]", "missing-file", "teacher[1].model"),
    ("teacher: ''", "unknown-step", "teacher"),
])  # fmt: skip
def test_invalid_folder_names_are_reported_with_setting(setting, code, field, tmp_path):
    error = command_error(harness.smelt("plan", home(tmp_path, "translation", setting), code=2))
    assert message_locations(error.messages) == [(code, f"stages[0].distill.{field}", 4)]
