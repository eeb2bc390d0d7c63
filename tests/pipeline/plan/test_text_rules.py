"""Where prefix and languages come from: the recipe, the model's text.json, its config."""

import json

import pytest

from smelt.core.errors import InputError
from smelt.models.text_rules import TextRules
from smelt.pipeline.plan.task_checks import resolve_text_rules
from tests.support.expected_errors import raises_code
from tests.support.parsed_recipes import parse_recipe

pytestmark = pytest.mark.quick

T5 = {
    "summarization": {"prefix": "summarize: ", "num_beams": 4},
    "translation_en_to_de": {"prefix": "translate English to German: "},
    "translation_en_to_fr": {"prefix": "translate English to French: "},
}


def rules(tmp_path, task="summarization", data="", kind="t5", params=T5):
    config = {"model_type": kind, "task_specific_params": params}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = f"model: m\ntask: {task}\ndata: {{test: x.jsonl{data}}}\nstages: []\n"
    return resolve_text_rules(parse_recipe(text, tmp_path / "r.yaml"), tmp_path)


def test_prefix_of_model_is_used_and_noted(tmp_path):
    text_rules, notes = rules(tmp_path)
    assert text_rules == TextRules(prefix="summarize: ")
    assert len(notes) == 1
    assert "'summarize: '" in notes[0]


def test_prefix_of_recipe_overrides_model_even_if_empty(tmp_path):
    assert rules(tmp_path, data=', prefix: "tl;dr: "')[0].prefix == "tl;dr: "
    assert rules(tmp_path, data=', prefix: ""')[0].prefix == ""


def test_languages_select_prefix_of_model(tmp_path):
    text_rules, _ = rules(tmp_path, "translation", ", source_language: en, target_language: fr")
    assert text_rules.prefix == "translate English to French: "
    none, notes = rules(tmp_path, "translation")
    assert none == TextRules()
    assert "translation_en_to_de, translation_en_to_fr" in notes[0]
    with raises_code("unknown-language", InputError) as excinfo:
        rules(tmp_path, "translation", ", source_language: en, target_language: xx")
    assert all(name in str(excinfo.value) for name in ("translation_en_to_xx", "translation_en_to_de"))


def test_saved_text_rules_override_model_config(tmp_path):
    (tmp_path / "text.json").write_text('{"prefix": "kept: "}')
    assert rules(tmp_path)[0].prefix == "kept: "


def test_multilingual_model_requires_languages(tmp_path):
    with raises_code("missing-languages", InputError) as excinfo:
        rules(tmp_path, "translation", kind="mbart", params=None)
    assert "source_language: en_XX" in str(excinfo.value)
    text_rules, notes = rules(
        tmp_path, "translation", ", source_language: en_XX, target_language: de_DE", kind="mbart", params=None
    )
    assert text_rules == TextRules(source_language="en_XX", target_language="de_DE")
    assert notes == ["languages en_XX to de_DE"]


def test_language_unknown_to_tokenizer_is_rejected_by_plan(tmp_path):
    tokenizer = {
        "model": {"vocab": {"<s>": 0, "old_XX": 1}},
        "added_tokens": [{"content": "eng_Latn", "id": 2}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))

    def notes_for(source, target):
        languages = f", source_language: {source}, target_language: {target}"
        return rules(tmp_path, "translation", languages, kind="m2m_100", params=None)[1]

    assert notes_for("eng_Latn", "old_XX") == ["languages eng_Latn to old_XX"]
    with raises_code("unknown-language", InputError) as excinfo:
        notes_for("eng_Latin", "old_XX")
    assert all(name in str(excinfo.value) for name in ("'eng_Latin'", "'eng_Latn'?"))
    with raises_code("unknown-language", InputError) as excinfo:
        notes_for("eng_Latn", "de_DE")
    assert "'de_DE'" in str(excinfo.value)
    with raises_code("missing-languages", InputError) as excinfo:
        rules(tmp_path, "translation", kind="m2m_100", params=None)
    assert "source_language: eng_Latn, target_language: deu_Latn" in str(excinfo.value)
    tokenizer["model"]["vocab"] = [["<s>", 0.0], ["deu_Latn", -1.0]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert notes_for("eng_Latn", "deu_Latn") == ["languages eng_Latn to deu_Latn"]


def test_target_language_of_marian_becomes_prefix(tmp_path):
    text_rules, _ = rules(tmp_path, "translation", ", target_language: fra", kind="marian", params=None)
    assert text_rules == TextRules(prefix=">>fra<< ")


def test_model_without_prefixes_has_no_text_rules(tmp_path):
    assert rules(tmp_path, kind="bart", params=None) == (TextRules(), [])


def test_prefix_is_rejected_for_classifier(tmp_path):
    with raises_code("does-not-fit-task", InputError) as excinfo:
        rules(tmp_path, "text-classification", ', prefix: "x "')
    assert excinfo.value.setting == "data.prefix"
