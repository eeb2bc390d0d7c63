"""A PyTorch module that classifies texts as the model of a recipe: what the plan writes and refuses."""

import json

import pytest

from smelt.core.errors import InputError
from smelt.pipeline.plan.load_plan import load_plan
from tests.support.expected_errors import error_codes, raises_code
from tests.support.models import text_modules


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(folder, function="text_cnn", stages=("onnx",), **model):
    return load_plan(
        text_modules.write_recipe(text_modules.write_module(folder, function), function, stages, **model)
    )


def test_folder_has_the_tokenizer_and_the_labels(tmp_path):
    folder = plan(tmp_path).local_model
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "negative", "1": "positive"}
    assert (config["vocab_size"], config["pad_token_id"], config["linear_layers"]) == (23, 0, 1)
    assert (folder / "vocab.txt").read_text() == (tmp_path / "tokenizer" / "vocab.txt").read_text()


@pytest.mark.parametrize(("function", "model", "code"), [
    ("text_cnn", {"tokenizer": None}, "missing-setting"),
    ("text_cnn", {"tokenizer": "absent"}, "missing-folder"),
    ("text_cnn", {"tokenizer": "."}, "damaged-tokenizer"),
    ("text_cnn", {"labels": "[a, b, c]"}, "labels-mismatch"),
    ("text_cnn", {"image_size": 16}, "does-not-fit-task"),
    ("small_table", {}, "module-failed"),  # a token has no embedding
    ("fixed_length", {}, "wrong-output"),
])  # fmt: skip
def test_module_or_tokenizer_that_does_not_fit_is_refused(function, model, code, tmp_path):
    with raises_code(code, InputError):
        plan(tmp_path, function, **model)


@pytest.mark.parametrize(("stage", "code"), [
    ("trim-vocabulary", "does-not-fit-model"), ("factorize: {targets: [embeddings]}", "does-not-fit-model"),
    ("prune: {targets: [heads]}", "does-not-fit-model"), ("drop-layers: {layers: 1}", "does-not-fit-model"),
    ("finetune: {lora: {r: 2}}", "does-not-fit-model"),
    ("share-weights: {targets: [embeddings]}", "does-not-fit-model"),
    ("prune: {targets: [channels]}", "does-not-fit-model"),
])  # fmt: skip
def test_stages_that_need_known_layers_are_refused(stage, code, tmp_path):
    with pytest.raises(InputError) as refused:
        plan(tmp_path, stages=(stage,))
    assert error_codes(refused.value) == [code]
