"""Students of another config, and students that were trained elsewhere."""

import json
import shutil

import pytest

import smelt
from smelt.compress.distill.settings import DistillSettings, StudentSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.shortlist import ShortlistSettings, ShortlistStage
from smelt.core.errors import InputError
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model
from smelt.models.text_rules import SHORTLIST_FILE as SHORTLIST
from smelt.pipeline.plan.load_plan import load_plan
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import classifiers, tiny

SHORT = {"max_steps": 20, "batch_size": 5, "learning_rate": 3e-3, "precision": "fp32", "dropout": 0.0}
SMALL = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 24, "max_position_embeddings": 32}


@pytest.fixture
def rows(tmp_path):
    file = tiny.write_labeled(tmp_path / "rows.jsonl")
    return read_split(str(file), "text-classification", Columns(), tmp_path)


def run(tmp_path, rows, source, **options):
    settings = DistillSettings.model_validate(SHORT | options)
    return harness.run_stage(Distill(), settings, source, tmp_path / "out", "text-classification", rows)


def test_narrow_student_from_config_learns_through_projection(tmp_path, rows):
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    source = tiny.write_bert(tmp_path / "model")
    losses = {"logits": 1, "labels": 0, "hidden_states": 1}
    ctx = run(tmp_path, rows, source, student={"config": str(tmp_path / "small.json")}, losses=losses)
    student, teacher = harness.load_output_model(ctx), load_model(source)[0]
    assert (student.config.hidden_size, len(student.bert.encoder.layer)) == (16, 1)
    assert student.config.vocab_size == teacher.config.vocab_size
    assert student.config.id2label == teacher.config.id2label
    start, *later = [validation["loss"] for validation in ctx.details["training"]["validations"]]
    assert min(later) < 0.9 * start
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out", "rows.jsonl", "small.json"]


def test_pretrained_student_of_other_family_keeps_its_weights(tmp_path, rows):
    source = tiny.write_bert(tmp_path / "model")
    student = classifiers.distilbert(tmp_path / "student")
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copyfile(source / name, student / name)
    ctx = run(tmp_path, rows, source, student=str(student), max_steps=1, learning_rate=1e-12)
    output_model, before = harness.load_output_model(ctx), load_model(student)[0]
    assert output_model.config.model_type == "distilbert"
    for name, parameter in output_model.named_parameters():
        assert (parameter - before.get_parameter(name)).abs().max() < 1e-6


def test_student_from_config_keeps_shortlist(tmp_path):
    """It reads and writes the same words as the model that the list was learned for."""
    source = tiny.write_marian(tmp_path / "model")
    rows = read_split(str(tiny.write_pairs(tmp_path / "pairs.jsonl")), "translation", Columns(), tmp_path)
    learned = ShortlistSettings(candidates_per_token=3, frequent_tokens=6)
    shortlist_folder = harness.run_stage(
        ShortlistStage(), learned, source, tmp_path / "listed", data=rows
    ).out
    settings = DistillSettings(student=StudentSettings(config=str(source)), **SHORT | {"max_steps": 1})
    ctx = harness.run_stage(Distill(), settings, shortlist_folder, tmp_path / "out", data=rows)
    assert (ctx.out / SHORTLIST).read_bytes() == (shortlist_folder / SHORTLIST).read_bytes()


def test_student_with_different_tokenizer_is_rejected(tmp_path, rows):
    source, student = tiny.write_bert(tmp_path / "model"), tiny.write_bert(tmp_path / "student")
    words = (student / "vocab.txt").read_text().splitlines()
    words[5], words[6] = words[6], words[5]
    (student / "vocab.txt").write_text("\n".join(words) + "\n")
    with raises_code("tokenizer-mismatch", InputError) as caught:
        run(tmp_path, rows, source, student=str(student))
    assert str(student) in str(caught.value)


@pytest.mark.parametrize(("config", "code"), [
    ({"model_type": "nothing"}, "unsupported-family"), ({"model_type": "marian"}, "different-kind"),
    ({"model_type": "bert", "vocab_size": 99}, "vocabulary-mismatch"),
])  # fmt: skip
def test_invalid_student_config_is_rejected_before_loading(tmp_path, config, code):
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = DistillSettings.model_validate({"student": str(tmp_path)})
    (error,), _ = Distill.check_model(settings, {"model_type": "bert", "vocab_size": 30})
    assert (error.setting, error.code) == ("student.model", code)


def test_student_with_model_and_layers_is_rejected():
    with raises_setting_codes("settings-conflict"):
        StudentSettings(model="x", layers=2)


def test_student_config_path_is_relative_and_its_content_is_in_key(tmp_path):
    tiny.write_bert(tmp_path / "model")
    tiny.write_labeled(tmp_path / "rows.jsonl")
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: model\ntask: text-classification\nthreads: 1\nscore: {latency: false}\n"
        "data: {train: rows.jsonl, validation: rows.jsonl, test: rows.jsonl}\nstages:\n"
        "  - distill: {student: {config: small.json}, max_steps: 1, num_evals: 0, precision: fp32}\n"
    )
    keys = []
    for width in (16, 16, 32):
        (tmp_path / "small.json").write_text(json.dumps(SMALL | {"intermediate_size": width}))
        result = smelt.run(recipe, out=tmp_path / "run", quiet=True)
        assert result.exit_code == 0
        keys.append(result.report["steps"][-1]["key"])
    assert keys[0] == keys[1] != keys[2]
    recipe.write_text(recipe.read_text().replace("small.json", "smal.json"))
    with raises_code("missing-file", InputError) as caught:
        load_plan(recipe)
    (error,) = caught.value.messages
    assert error.setting == "stages[0].distill.student.config"
    assert "smal.json" in error.message
