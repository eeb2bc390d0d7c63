"""Prompt templates: equal to transformers' chat templates, files, errors, and what is stored with a model."""

import json

import pytest

from smelt.core.errors import InputError
from smelt.models.chat_rendering import ChatRequest
from smelt.models.checkpoint import copy_tokenizer, load_tokenizer, write_text_rules
from smelt.models.prompt_template import (
    PromptTemplate,
    open_prompt_template,
    read_chat_template,
    read_special_tokens,
)
from smelt.models.text_rules import TextRules, read_prompt_template, read_text_rules
from tests.support.expected_errors import raises_code
from tests.support.models import causal, chat_templates, tiny

TALK = [
    {"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": " Wer bist du? \n"},
    {"role": "assistant", "content": "Niemand's fool."}, {"role": "user", "content": "ä\n\nb"},
]  # fmt: skip
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
def test_rendered_chats_equal_transformers(tmp_path, name, begins):
    words = _write_tokenizer(tmp_path / "m", getattr(chat_templates, name))
    template = open_prompt_template(tmp_path / "m", "chat", {})
    messages = TALK[1:2] if begins == 1 else TALK[:begins]
    expected = [
        words.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=added, enable_thinking=False
        )
        for added in (True, False)
    ]
    requests = [ChatRequest(messages, True), ChatRequest(messages, False)]
    assert template.render_chats(requests) == expected
    rendered = words.apply_chat_template([*messages, ANSWER], tokenize=False, enable_thinking=False)
    parts = template.render_response([*messages, ANSWER])
    assert parts.content == ANSWER["content"]
    assert parts.end.strip() == (words.eos_token if name == "LLAMA2" else "<|im_end|>")
    if name != "EXOTIC":  # what begins a response is not in the rendered response
        assert rendered.startswith(parts.prompt + parts.response)


def test_special_tokens_equal_transformers(tmp_path):
    words = _write_tokenizer(tmp_path / "m", chat_templates.LLAMA2)
    assert read_special_tokens(tmp_path / "m") == words.special_tokens_map


def test_response_includes_end_of_turn():
    template = PromptTemplate("chat", chat_templates.CHATML)
    parts = template.render_response([TALK[3], ANSWER])
    assert (parts.response, parts.end) == ("Yes!<|im_end|>", "<|im_end|>")
    assert PromptTemplate("Q: {prompt}\nA:").render_response([TALK[3], ANSWER]).end == ""
    no_end = PromptTemplate("chat", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert no_end.render_response([TALK[3], ANSWER]).end == ""


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (chat_templates.CHATML, ">", ("", ">", "<|im_end|>")),
        (chat_templates.CHATML, "end", ("", "end", "<|im_end|>")),
        (chat_templates.CHATML, "user", ("", "user", "<|im_end|>")),
        (chat_templates.CHATML, "\ue000 x", ("", "\ue000 x", "<|im_end|>")),  # a letter used as a mark
        (chat_templates.LLAMA2, " s ", (" ", "s", " </s>")),  # the template strips the content
        (chat_templates.OPENED_THINKING, "yes", ("", "yes", "<|im_end|>")),
        (chat_templates.SPLIT_THINKING, "x</think>end", ("", "x</think>end", "<|im_end|>")),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content | upper }}[/{{ m.role }}]{% endfor %}", "roles",
         ("[assistant]", "ROLES", "[/assistant]")),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "a", ("", "a", "")),
    ],
)  # fmt: skip
def test_response_parts_are_correct_when_content_overlaps_template(template, answer, expected):
    chat = PromptTemplate("chat", template, {"bos_token": "<s>", "eos_token": "</s>"})
    parts = chat.render_response([TALK[3], {"role": "assistant", "content": answer}])
    assert (parts.lead, parts.content, parts.end) == expected


def test_braces_in_texts_are_not_substituted():
    assert PromptTemplate("Q: {prompt}\nA:").render("{x} {prompt}") == "Q: {x} {prompt}\nA:"


@pytest.mark.parametrize(("template", "chat", "prompt", "code"), [
    ("{prompt}", "", json.dumps(TALK), "needs-chat-template"),
    ("chat", chat_templates.LLAMA2, json.dumps([TALK[1], TALK[3]]), "chat-template-failed"),
    ("chat", "{% for %}", "text", "chat-template-failed"),
    ("chat", "{{ messages[0].role.upper.missing() }}", "text", "chat-template-failed"),
    ("chat", "{{ ''.__class__.__mro__ }}", "text", "chat-template-failed"),
    ("chat", chat_templates.CHATML, json.dumps(TALK[:3]), "no-user-turn"),
    ("chat", chat_templates.CHATML, json.dumps([{"role": "tool", "content": "x"}]), "unknown-role"),
])  # fmt: skip
def test_invalid_prompts_are_rejected(template, chat, prompt, code):
    with raises_code(code, InputError):
        PromptTemplate(template, chat).render(prompt)


def test_chat_without_chat_template_is_rejected(tmp_path):
    _write_tokenizer(tmp_path / "m")
    with raises_code("no-chat-template", InputError):
        open_prompt_template(tmp_path / "m", "chat", {})


def test_chat_templates_are_read_from_all_locations(tmp_path):
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


def test_text_rules_are_copied_and_end_generation_at_end_of_turn(tmp_path):
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


def test_end_of_turn_resembling_response_ends_generation(tmp_path):
    folder = causal.write_model(tmp_path / "m", "qwen2", vocab_size=400)
    words = load_tokenizer(folder)
    words.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|a_turn_ends|>"]})
    words.chat_template = (
        "{% for m in messages %}<|start|>{{ m.content }}<|a_turn_ends|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>{% endif %}"
    )
    words.save_pretrained(folder)
    write_text_rules(folder, TextRules(prompt_template="chat"))
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, words.convert_tokens_to_ids("<|a_turn_ends|>")]


def test_cache_keys_without_template_are_unchanged():
    assert TextRules().cache_key() == {"prefix": "", "source_language": None, "target_language": None}
    assert TextRules(prompt_template="x{prompt}").cache_key()["prompt_template"] == "x{prompt}"


def test_models_of_other_tasks_have_no_template(tmp_path):
    folder = tiny.write_marian(tmp_path / "m")
    assert read_prompt_template(folder) is None
