"""What sentence-transformers' files say, in both spellings, and what smelt does not do."""

import json

import pytest

from smelt.core.errors import InputError
from smelt.models.text_rules import (
    POOLINGS,
    SentenceRules,
    default_prompt,
    read_sentence_rules,
    write_sentence_rules,
)
from tests.support.expected_errors import raises_code

OLD = "sentence_transformers.models"
NEW = "sentence_transformers.sentence_transformer.modules.pooling"


def folder(home, modules=("Transformer", "Pooling", "Normalize"), pooling=None, settings=None, **first):
    (home / "1_Pooling").mkdir()
    module_entries = [
        {"idx": i, "name": str(i), "path": "", "type": f"{OLD}.{m}"} for i, m in enumerate(modules)
    ]
    module_entries[1:2] = [{**module_entries[1], "path": "1_Pooling"}] if len(module_entries) > 1 else []
    module_entries[0] |= first
    (home / "modules.json").write_text(json.dumps(module_entries))
    (home / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode": "cls"} if pooling is None else pooling)
    )
    if settings is not None:
        (home / "sentence_bert_config.json").write_text(json.dumps(settings))
    return home


def test_folder_without_modules_has_no_rules(tmp_path):
    assert read_sentence_rules(tmp_path) is None


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("normalize", [True, False])
def test_written_rules_are_read_back(pooling, normalize, tmp_path):
    rules = SentenceRules(pooling=pooling, normalize=normalize, max_length=77, lower=True)
    write_sentence_rules(tmp_path, rules, 32)
    assert read_sentence_rules(tmp_path) == rules
    assert json.loads((tmp_path / "1_Pooling" / "config.json").read_text())["word_embedding_dimension"] == 32


@pytest.mark.parametrize(("pooling", "expected"), [
    ({"pooling_mode": "max", "embedding_dimension": 8, "include_prompt": True}, "max"),
    ({"pooling_mode": ["cls"]}, "cls"),
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
    ({"pooling_mode_max_tokens": True}, "max"),
    # sentence-transformers' default
    ({"word_embedding_dimension": 8}, "mean"),
])  # fmt: skip
def test_pooling_is_read_from_name_or_flags(pooling, expected, tmp_path):
    rules = read_sentence_rules(folder(tmp_path, pooling=pooling, settings={"max_seq_length": 9}))
    assert rules == SentenceRules(pooling=expected, max_length=9)


def test_renamed_module_types_are_recognized(tmp_path):
    folder(tmp_path)
    text = (tmp_path / "modules.json").read_text().replace(f"{OLD}.Pooling", f"{NEW}.Pooling")
    (tmp_path / "modules.json").write_text(text)
    assert read_sentence_rules(tmp_path) == SentenceRules(pooling="cls")


def test_settings_file_named_after_family_is_read(tmp_path):
    folder(tmp_path)
    (tmp_path / "sentence_roberta_config.json").write_text('{"max_seq_length": 5, "do_lower_case": true}')
    assert read_sentence_rules(tmp_path) == SentenceRules(pooling="cls", max_length=5, lower=True)


VERSION_6 = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
    "query_length": None,
}


@pytest.mark.parametrize(("settings", "limit"), [
    (VERSION_6, None), ({"processing_kwargs": {"text": {"max_length": 12, "truncation": True}}}, 12),
    ({"processing_kwargs": {"common": {"max_length": 12, "return_tensors": "pt"}}}, 12),
    ({"processing_kwargs": {"common": {"max_length": 12}, "text": {"max_length": 9}}}, 9),
    ({"tokenizer_args": {"model_max_length": 12, "use_fast": True}, "max_seq_length": 20}, 12),
    ({"processor_kwargs": {"model_max_length": 12}, "max_seq_length": None}, 12),
    ({"processing_kwargs": {"text": {"max_length": 9}}, "tokenizer_args": {"model_max_length": 12}}, 9),
    ({"tokenizer_args": {"model_max_length": 10**30}}, None),
    ({"model_args": {"add_pooling_layer": False}, "config_args": {}, "max_seq_length": 7}, 7),
])  # fmt: skip
def test_max_length_equals_sentence_transformers(settings, limit, tmp_path):
    rules = read_sentence_rules(folder(tmp_path, settings=settings))
    assert rules == SentenceRules(pooling="cls", max_length=limit)


@pytest.mark.parametrize(("settings", "setting"), [
    ({"max_length": 9}, "max_length"), ({"transformer_task": "fill-mask"}, "transformer_task"),
    ({"query_expansion": {"strategy": "fixed", "length": 32}}, "query_expansion"),
    ({"processing_kwargs": {"max_length": 9}}, "processing_kwargs.max_length"),
    ({"processing_kwargs": {"text": {"truncation": False}}}, "processing_kwargs.text.truncation"),
    ({"processing_kwargs": {"text": {"stride": 2}}}, "processing_kwargs.text.stride"),
    ({"tokenizer_args": {"truncation_side": "left"}}, "tokenizer_args.truncation_side"),
    ({"config_args": {"hidden_size": 9}}, "config_args.hidden_size"),
    ({"modality_config": {"message": {"method": "forward"}}}, "modality_config.message"),
    ({"modality_config": {"text": {"method": "get_text_features"}}}, "modality_config.text.method"),
])  # fmt: skip
def test_settings_that_may_change_vectors_are_rejected(settings, setting, tmp_path):
    with raises_code("unsupported-setting", InputError) as caught:
        read_sentence_rules(folder(tmp_path, settings=settings))
    assert caught.value.setting == setting
    assert str(tmp_path / "sentence_bert_config.json") in str(caught.value)


@pytest.mark.parametrize(("options", "code", "named"), [
    ({"modules": ("Transformer", "Pooling", "Dense", "Normalize")}, "unsupported-modules",
     "Transformer, Pooling, Dense, Normalize"),
    ({"modules": ("Transformer", "Pooling", "LayerNorm")}, "unsupported-modules",
     "Transformer, Pooling, LayerNorm"),
    ({"modules": ("StaticEmbedding",)}, "unsupported-modules", "StaticEmbedding"),
    ({"path": "0_Transformer"}, "outdated-modules", "'0_Transformer'"),
    ({"type": 3}, "missing-module-type", ""),
    ({"pooling": {"pooling_mode": ["cls", "mean"]}}, "several-poolings", "(cls, mean)"),
    ({"pooling": {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}}, "several-poolings",
     "(cls, max)"),
    ({"pooling": {"pooling_mode": "weightedmean"}}, "unsupported-pooling", "'weightedmean'"),
    ({"pooling": {"pooling_mode_lasttoken": True}}, "unsupported-pooling", "'lasttoken'"),
    ({"pooling": {"pooling_mode": "mean", "include_prompt": False}}, "unsupported-prompt-pooling",
     "include_prompt"),
    ({"settings": {"max_seq_length": "long"}}, "wrong-value", "max_seq_length"),
    ({"settings": {"max_seq_length": 0}}, "wrong-value", "max_seq_length"),
    ({"settings": [1]}, "wrong-json-type", ""),
    ({"settings": {"processing_kwargs": {"text": 9}}}, "wrong-json-type", "processing_kwargs.text"),
    ({"settings": {"tokenizer_args": {"model_max_length": "x"}}}, "wrong-value", "model_max_length"),
    ({"pooling": {"pooling_mode": "cls", "layers": [1, 2]}}, "unsupported-setting", "layers"),
])  # fmt: skip
def test_unsupported_modules_are_rejected_with_file(options, code, named, tmp_path):
    with raises_code(code, InputError) as error:
        read_sentence_rules(folder(tmp_path, **options))
    assert str(tmp_path) in str(error.value)
    assert named in str(error.value)


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json"])
def test_damaged_file_is_rejected(name, tmp_path):
    folder(tmp_path)
    (tmp_path / name).write_text("{")
    with raises_code("damaged-file", InputError) as caught:
        read_sentence_rules(tmp_path)
    assert name in str(caught.value)


def test_default_prompt_is_read(tmp_path):
    assert default_prompt(tmp_path) == ""
    path = tmp_path / "config_sentence_transformers.json"
    path.write_text('{"prompts": {"query": "ask: "}, "default_prompt_name": null}')
    assert default_prompt(tmp_path) == ""
    path.write_text('{"prompts": {"query": "ask: "}, "default_prompt_name": "query"}')
    assert default_prompt(tmp_path) == "ask: "
