"""Rows of text generation: three layouts, conversations as prompts, and every error with its code."""

import json

import pytest

from smelt.core.errors import InputError
from smelt.data.prompt_rows import assistant_turns, conversation_text, parse_conversation, prompt_messages
from smelt.data.splits import Columns
from smelt.tasks.read_split import read_split
from smelt.tasks.text_generation import parse_prompt
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick
USER, ASSISTANT, SYSTEM = ({"role": role, "content": role[:1]} for role in ("user", "assistant", "system"))


def _read(tmp_path, *rows, **columns):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_split(str(path), "text-generation", Columns(**columns), tmp_path).examples


def test_three_layouts_give_prompt_and_references(tmp_path):
    rows = [
        {"prompt": "p", "response": "r"},
        {"prompt": "p", "responses": ["r", "s"], "response": "unread"},
        {"instruction": "do", "input": "", "output": "done"},
        {"instruction": "do", "input": "this", "output": "done"},
        {"messages": [USER, ASSISTANT]},
    ]
    examples = _read(tmp_path, *rows)
    assert [(e.text, e.references, e.layout, e.line) for e in examples] == [
        ("p", ("r",), "prompt", 1),
        ("p", ("r", "s"), "prompt", 2),
        ("do", ("done",), "instruction", 3),
        ("do\n\nthis", ("done",), "instruction", 4),
        ("u", ("a",), "messages", 5),
    ]


def test_several_turns_or_system_message_form_conversation(tmp_path):
    turns = [SYSTEM, USER, ASSISTANT, USER]
    [example] = _read(tmp_path, {"messages": [*turns, {**ASSISTANT, "content": "last"}], "prompt": "unread"})
    assert (json.loads(example.text), example.references) == (turns, ("last",))
    assert parse_conversation(example.text) == turns
    contents = [[m["content"] for m in turn] for turn in assistant_turns(example.text, "last")]
    assert contents == [["s", "u", "a"], ["s", "u", "a", "u", "last"]]


def test_named_columns_determine_layout(tmp_path):
    row = {"messages": [USER, ASSISTANT], "question": "q", "answers": ["1", "2"]}
    [example] = _read(tmp_path, row, prompt="question", responses="answers")
    assert (example.text, example.references, example.layout) == ("q", ("1", "2"), "prompt")


def test_messages_in_csv_may_be_json(tmp_path):
    path = tmp_path / "rows.csv"
    cell = json.dumps([USER, ASSISTANT]).replace('"', '""')
    path.write_text(f'messages\n"{cell}"\n')
    [example] = read_split(str(path), "text-generation", Columns(), tmp_path).examples
    assert (example.text, example.references) == ("u", ("a",))


@pytest.mark.parametrize(("row", "code"), [
    ({"text": "t"}, "missing-column"), ({"prompt": "p"}, "missing-column"),
    ({"instruction": "p"}, "missing-column"), ({"prompt": " ", "response": "r"}, "empty-text"),
    ({"prompt": "p", "response": " "}, "empty-text"), ({"prompt": "p", "responses": []}, "empty-text"),
    ({"prompt": "p", "responses": ["r", ""]}, "empty-text"),
    ({"prompt": "p", "responses": "r"}, "wrong-column-type"),
    ({"prompt": 1, "response": "r"}, "wrong-column-type"),
    ({"prompt": "p\ud800", "response": "r"}, "lone-surrogate"),
    ({"instruction": "", "output": "r"}, "empty-text"), ({"messages": "hello"}, "wrong-column-type"),
    ({"messages": []}, "wrong-column-type"),
    ({"messages": [{"role": "user"}, ASSISTANT]}, "wrong-column-type"),
    ({"messages": [USER]}, "no-assistant-turn"), ({"messages": [ASSISTANT]}, "no-assistant-turn"),
    ({"messages": [USER, ASSISTANT, USER]}, "no-assistant-turn"),
    ({"messages": [USER, ASSISTANT, ASSISTANT]}, "no-assistant-turn"),
    ({"messages": [{**USER, "role": "human"}, ASSISTANT]}, "unknown-role"),
    ({"messages": [{**USER, "content": " "}, ASSISTANT]}, "empty-text"),
    ({"messages": [USER, {**ASSISTANT, "content": "\n"}]}, "empty-text"),
    ({"messages": [USER, {**ASSISTANT, "content": "\udc00"}]}, "lone-surrogate"),
])  # fmt: skip
def test_invalid_rows_are_rejected_with_line(tmp_path, row, code):
    with raises_code(code, InputError) as excinfo:
        _read(tmp_path, {"prompt": "p", "response": "r"}, row)
    assert excinfo.value.line == 2


def test_prompt_does_not_require_response():
    assert parse_prompt({"prompt": "p"}, "f:1", Columns()).text == "p"


@pytest.mark.parametrize("text", [
    "plain", "[1, 2]", "[]", '[{"role": "user"}]', '[{"role": "user", "content": 1}]', "[",
    '{"role": "user"}',
])  # fmt: skip
def test_other_json_is_plain_text(text):
    assert parse_conversation(text) is None
    assert prompt_messages(text) == [{"role": "user", "content": text}]


def test_nested_conversation_text_is_kept():
    inner = [{"role": "user", "content": conversation_text([SYSTEM, USER])}]
    assert prompt_messages(conversation_text(inner)) == inner


@pytest.mark.parametrize(
    ("messages", "code"), [([USER, ASSISTANT], "no-user-turn"), ([{**USER, "role": "x"}], "unknown-role")]
)
def test_unanswerable_prompts_are_rejected(messages, code):
    with raises_code(code, InputError):
        prompt_messages(json.dumps(messages))


CHOICES = {"prompt": "p", "choices": [" a", " b"]}


def test_correct_choice_is_reference(tmp_path):
    rows = [
        CHOICES | {"answer": 1},
        CHOICES | {"answer": " a", "response": "r"},
        {"messages": [USER, ASSISTANT], "choices": '["0", "2"]', "answer": "0"},  # the text comes first
        {"instruction": "i", "input": "", "choices": [" a", " b"], "answer": 1.0},
    ]
    examples = _read(tmp_path, *rows)
    assert [(e.choices, e.answer, e.references) for e in examples] == [
        ((" a", " b"), 1, (" b",)), ((" a", " b"), 0, ("r",)), (("0", "2"), 0, ("a",)),
        ((" a", " b"), 1, (" b",)),
    ]  # fmt: skip
    [example] = _read(
        tmp_path, {"prompt": "p", "options": ["a", "b"], "key": 0}, choices="options", answer="key"
    )
    assert example.references == ("a",)
    [other] = _read(tmp_path, {"prompt": "p", "response": "r", "choices": {"text": ["unread"]}})
    assert other.choices == ()


@pytest.mark.parametrize(("row", "code"), [
    ({"choices": [" a", " b"], "answer": 2}, "no-right-choice"),
    ({"choices": [" a", " b"], "answer": "c"}, "no-right-choice"),
    ({"choices": [" a", " b"], "answer": True}, "no-right-choice"),
    ({"choices": [" a"], "answer": 0}, "too-few-choices"),
    ({"choices": [" a", " "], "answer": 0}, "empty-text"),
    ({"choices": [" a", " a"], "answer": 0}, "duplicate-choice"),
    ({"choices": "a, b", "answer": 0}, "wrong-column-type"), ({"choices": ["a", "b"]}, "missing-column"),
    ({"response": "r"}, "partly-missing-column"),
])  # fmt: skip
def test_invalid_choice_is_reported_with_line(tmp_path, row, code):
    with raises_code(code, InputError) as excinfo:
        _read(tmp_path, CHOICES | {"answer": 0}, {"prompt": "p"} | row)
    assert code == "partly-missing-column" or ":2:" in str(excinfo.value)
