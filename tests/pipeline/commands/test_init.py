"""`smelt init` on the command line: what it writes, prints and refuses."""

import json
import shutil

import for_init
import harness
import pytest
import seq2seq
import tiny

from smelt.core.errors import InputError
from smelt.plan.load import load_plan


@pytest.fixture(scope="module")
def models():
    return for_init.models()


def test_columns_and_languages_are_taken_from_the_command_line(tmp_path, models, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.csv").write_text("xx;yy\n" + "".join(f"a {i};{i % 2}\n" for i in range(20)))

    def smelt(*arguments):
        return harness.smelt("init", *arguments)

    refused = smelt(models["bert"], "--data", "all.csv")
    assert refused.exit_code == 2
    assert (
        "no column looks like the text; there are: xx, yy. Name it with --column text=NAME." in refused.output
    )
    done = smelt(
        models["bert"], "--data", "all.csv", "--column", "text=xx", "--column", "label=yy", "--out", "r.yaml"
    )
    assert done.exit_code == 0, done.output
    assert load_plan(tmp_path / "r.yaml").recipe.data.columns.text == "xx"
    assert "Did you mean 'label'" in smelt(models["bert"], "--column", "lable=yy").output
    other = shutil.copytree(models["mbart"], tmp_path / "mbart")
    path = other / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tgt_lang"}))
    tiny.pairs(tmp_path / "train.jsonl", 20)
    assert "--source-language en_XX --target-language de_DE" in smelt(other, "--data", "train.jsonl").output
    done = smelt(other, "--data", "train.jsonl", "--target-language", "de_DE", "--out", "m.yaml")
    assert done.exit_code == 0, done.output
    data = load_plan(tmp_path / "m.yaml").recipe.data
    assert (data.source_language, data.target_language) == ("en_XX", "de_DE")
    assert "a bert model takes none" in smelt(models["bert"], "--source-language", "en").output


def test_the_command_writes_prints_and_never_overwrites(tmp_path, models, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def smelt(*arguments):
        return harness.smelt("init", models["bert"], *arguments)

    done = smelt()
    assert done.exit_code == 0
    assert "Wrote m.yaml" in done.output
    text = (tmp_path / "m.yaml").read_text()
    assert "data/train.jsonl" in text
    (tmp_path / "m.yaml").write_text("mine")
    refused = smelt()
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert (tmp_path / "m.yaml").read_text() == "mine"
    assert smelt("--force").exit_code == 0
    assert (tmp_path / "m.yaml").read_text() == text
    assert smelt("--out", "-").output == text.replace("m.yaml", "RECIPE.yaml")
    with pytest.raises(InputError, match=r"train.jsonl: no such file"):  # the only thing that is missing
        load_plan(tmp_path / "m.yaml")


def test_an_artifact_of_a_run_is_called_by_its_step(tmp_path, models, monkeypatch):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "small").symlink_to(models["bert"])
    monkeypatch.chdir(tmp_path)
    result = harness.smelt("init", "artifacts/small")
    assert "Wrote small.yaml" in result.output
    assert "\nmodel: artifacts/small\n" in (tmp_path / "small.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/m"], "no such folder"),
        (["{bert}", "--task", "translation"], "a bert model is for text-classification"),
        (["{bert}", "--task", "translate"], "Did you mean 'translation'?"),
        (["{bert}", "--data", "nowhere"], "no such file or folder"),
        (["{bert}", "--data", "{bert}"], "no file in this folder is called train, validation or test"),
        (["{mbart}", "--task", "language-modeling"], "is for translation or summarization"),
    ],
)
def test_what_cannot_be_is_explained(tmp_path, models, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere").mkdir() if arguments == ["nowhere/m"] else None
    places = {"{bert}": models["bert"], "{mbart}": models["bert"]}
    if "{mbart}" in arguments:
        places["{mbart}"] = seq2seq.bart(tmp_path / "mbart", kind="mbart")
    result = harness.smelt("init", *(places.get(a, a) for a in arguments))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
