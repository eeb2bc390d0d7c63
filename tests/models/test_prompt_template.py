"""Prompt templates: equal to transformers' chat templates, files, errors, and what is stored with a model."""

import json

import causal
import chat_templates
import pytest
import tiny
from expected_errors import raises_code

from smelt.core.errors import InputError
from smelt.models.checkpoint import copy_tokenizer, load_tokenizer, write_text_rules
from smelt.models.prompt_template import (
    PromptTemplate,
    open_prompt_template,
    read_chat_template,
    read_special_tokens,
)
from smelt.models.text_rules import TextRules, read_prompt_template, read_text_rules

TALK = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": " Wer bist du? \n"},
    {"role": "assistant", "content": "Niemand's fool."},
    {"role": "user", "content": "ä\n\nb"},
]
ANSWER = {"role": "assistant", "content": "Yes!"}


def _write_tokenizer(folder, template=None):
    folder.mkdir()
    words = causal.write_tokenizer(folder)
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = template
    words.save_pretrained(folder)
    return words


@pytest.mark.parametrize("name", ["CHATML", "LLAMA2", "THINKING", "EXOTIC"])
@pytest.mark.parametrize("begins", [1, 2, 4])
def test_chats_are_rendered_as_by_transformers(tmp_path, name, begins):
    words = _write_tokenizer(tmp_path / "m", getattr(chat_templates, name))
    template = open_prompt_template(tmp_path / "m", "chat", {})
    messages = TALK[1:2] if begins == 1 else TALK[:begins]
    for added in (True, False):
        expected = words.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=added, enable_thinking=False
        )
        assert template.render_chat(messages, added) == expected
    whole = words.apply_chat_template([*messages, ANSWER], tokenize=False, enable_thinking=False)
    parts = template.render_response([*messages, ANSWER])
    if name == "EXOTIC":  # what begins a response is not in the rendered response
        assert (parts.response, parts.ended) == (ANSWER["content"], False)
    else:
        assert whole.startswith(parts.prompt + parts.response)


def test_special_tokens_are_those_of_transformers(tmp_path):
    words = _write_tokenizer(tmp_path / "m", chat_templates.LLAMA2)
    assert read_special_tokens(tmp_path / "m") == words.special_tokens_map


def test_the_end_of_a_turn_belongs_to_the_response():
    template = PromptTemplate("chat", chat_templates.CHATML)
    parts = template.render_response([TALK[3], ANSWER])
    assert (parts.response, parts.ended) == ("Yes!<|im_end|>", True)
    assert PromptTemplate("Q: {prompt}\nA:").render_response([TALK[3], ANSWER]).ended is False
    no_end = PromptTemplate("chat", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert no_end.render_response([TALK[3], ANSWER]).ended is False


def test_texts_are_put_into_the_template_as_they_are():
    assert PromptTemplate("Q: {prompt}\nA:").render("{x} {prompt}") == "Q: {x} {prompt}\nA:"


@pytest.mark.parametrize(
    ("template", "chat", "prompt", "code"),
    [
        ("{prompt}", "", json.dumps(TALK), "needs-chat-template"),
        ("chat", chat_templates.LLAMA2, json.dumps([TALK[1], TALK[3]]), "chat-template-failed"),
        ("chat", "{% for %}", "text", "chat-template-failed"),
        ("chat", "{{ messages[0].role.upper.missing() }}", "text", "chat-template-failed"),
        ("chat", "{{ ''.__class__.__mro__ }}", "text", "chat-template-failed"),
        ("chat", chat_templates.CHATML, json.dumps(TALK[:3]), "no-user-turn"),
        ("chat", chat_templates.CHATML, json.dumps([{"role": "tool", "content": "x"}]), "unknown-role"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(template, chat, prompt, code):
    with raises_code(code, InputError):
        PromptTemplate(template, chat).render(prompt)


def test_chat_without_a_chat_template_is_refused(tmp_path):
    _write_tokenizer(tmp_path / "m")
    with raises_code("no-chat-template", InputError):
        open_prompt_template(tmp_path / "m", "chat", {})


def test_templates_are_read_from_each_place(tmp_path):
    words = _write_tokenizer(tmp_path / "file", "one")
    assert read_chat_template(tmp_path / "file") == "one"
    words.save_pretrained(tmp_path / "old", save_jinja_files=False)
    assert (read_chat_template(tmp_path / "old"), (tmp_path / "old" / "chat_template.jinja").exists()) == (
        "one",
        False,
    )
    words.chat_template = {"default": "two", "rag": "three"}
    words.save_pretrained(tmp_path / "many", save_jinja_files=False)
    assert read_chat_template(tmp_path / "many") == "two"
    (tmp_path / "many" / "tokenizer_config.json").write_text("{")
    with raises_code("damaged-file", InputError):
        read_chat_template(tmp_path / "many")


def test_rules_follow_the_tokenizer_and_end_generation_with_the_turn(tmp_path):
    folder = causal.write_model(tmp_path / "m", "qwen2", vocab_size=400)
    words = load_tokenizer(folder)
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = chat_templates.CHATML
    words.save_pretrained(folder)
    write_text_rules(folder, TextRules(prompt_template="chat"))
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, words.convert_tokens_to_ids("<|im_end|>")]
    write_text_rules(folder, TextRules(prompt_template="chat"))  # nothing is added twice
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends
    (tmp_path / "next").mkdir()
    copy_tokenizer(folder, tmp_path / "next")
    assert read_prompt_template(tmp_path / "next") == read_prompt_template(folder)
    assert read_text_rules(folder).special_tokens == words.special_tokens_map
    assert load_tokenizer(tmp_path / "next").smelt_prompts.is_chat


def test_keys_of_other_tasks_do_not_change():
    assert TextRules().cache_key() == {"prefix": "", "source_language": None, "target_language": None}
    assert TextRules(prompt_template="x{prompt}").cache_key()["prompt_template"] == "x{prompt}"


def test_models_of_other_tasks_have_no_template(tmp_path):
    folder = tiny.write_marian(tmp_path / "m")
    assert read_prompt_template(folder) is None
