"""`smelt init` on the command line: what it writes, prints and refuses."""

import json
import shutil

import pytest

from smelt.core.errors import InputError
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.models import init_models, seq2seq, tiny


@pytest.fixture(scope="module")
def models():
    return init_models.make_models()


def test_columns_and_languages_are_read_from_options(tmp_path, models, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.csv").write_text("xx;yy\n" + "".join(f"a {i};{i % 2}\n" for i in range(20)))

    def smelt(*arguments):
        return harness.smelt("init", *arguments)

    error = command_error(smelt(models["bert"], "--data", "all.csv"))
    assert (error.code, error.exit_code) == ("missing-column", 2)
    assert all(value in str(error) for value in ("xx, yy", "--column text=NAME"))
    done = smelt(
        models["bert"], "--data", "all.csv", "--column", "text=xx", "--column", "label=yy", "--out", "r.yaml"
    )
    assert done.exit_code == 0, done.output
    assert load_plan(tmp_path / "r.yaml").recipe.data.columns.text == "xx"
    error = command_error(smelt(models["bert"], "--column", "lable=yy"))
    assert (error.code, "'label'?" in str(error)) == ("wrong-value", True)
    other = shutil.copytree(models["mbart"], tmp_path / "mbart")
    path = other / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tgt_lang"}))
    tiny.write_pairs(tmp_path / "train.jsonl", 20)
    error = command_error(smelt(other, "--data", "train.jsonl"))
    assert error.code == "missing-languages"
    assert "--source-language en_XX --target-language de_DE" in str(error)
    done = smelt(other, "--data", "train.jsonl", "--target-language", "de_DE", "--out", "m.yaml")
    assert done.exit_code == 0, done.output
    data = load_plan(tmp_path / "m.yaml").recipe.data
    assert (data.source_language, data.target_language) == ("en_XX", "de_DE")
    error = command_error(smelt(models["bert"], "--source-language", "en"))
    assert (error.code, "bert" in str(error)) == ("does-not-fit-model", True)


def test_init_writes_recipe_and_never_overwrites(tmp_path, models, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def smelt(*arguments):
        return harness.smelt("init", models["bert"], *arguments)

    done = smelt()
    assert done.exit_code == 0
    assert "Wrote m.yaml" in done.output
    text = (tmp_path / "m.yaml").read_text()
    assert "data/train.jsonl" in text
    (tmp_path / "m.yaml").write_text("mine")
    error = command_error(smelt())
    assert (error.code, error.exit_code) == ("file-exists", 2)
    assert "--force" in str(error)
    assert (tmp_path / "m.yaml").read_text() == "mine"
    assert smelt("--force").exit_code == 0
    assert (tmp_path / "m.yaml").read_text() == text
    assert smelt("--out", "-").output == text.replace("m.yaml", "RECIPE.yaml")
    with raises_code("missing-file", InputError) as excinfo:  # the only thing that is missing
        load_plan(tmp_path / "m.yaml")
    assert "train.jsonl: " in str(excinfo.value)


def test_init_names_recipe_after_step_of_artifact(tmp_path, models, monkeypatch):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "small").symlink_to(models["bert"])
    monkeypatch.chdir(tmp_path)
    result = harness.smelt("init", "artifacts/small")
    assert "Wrote small.yaml" in result.output
    assert "\nmodel: artifacts/small\n" in (tmp_path / "small.yaml").read_text()


@pytest.mark.parametrize(("arguments", "code", "named"), [
    (["nowhere/m"], "missing-folder", "nowhere"),
    (["{bert}", "--task", "translation"], "unsupported-task", "text-classification"),
    (["{bert}", "--task", "translate"], "unknown-task", "'translation'?"),
    (["{bert}", "--data", "nowhere"], "missing-file", "nowhere"),
    (["{bert}", "--data", "{bert}"], "missing-data", ""),
    (["{mbart}", "--task", "language-modeling"], "unsupported-task", "translation or summarization"),
])  # fmt: skip
def test_invalid_init_arguments_are_explained(tmp_path, models, monkeypatch, arguments, code, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere").mkdir() if arguments == ["nowhere/m"] else None
    model_paths = {"{bert}": models["bert"], "{mbart}": models["bert"]}
    if "{mbart}" in arguments:
        model_paths["{mbart}"] = seq2seq.write_bart(tmp_path / "mbart", kind="mbart")
    error = command_error(harness.smelt("init", *(model_paths.get(a, a) for a in arguments), code=2))
    assert error.code == code
    assert named in str(error)
