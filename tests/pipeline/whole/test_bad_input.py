"""Whatever is wrong with what a user brings is said in words, with exit code 2 and without a traceback."""

import json
import re

import pytest

from tests.support import harness
from tests.support.standins.invalid_recipes import RECIPE, TRANSLATION_RECIPE, assert_refused
from tests.support.standins.sample_report import make_message

pytest_plugins = ["tests.support.standins.invalid_recipes"]


@pytest.mark.parametrize(
    ("rows", "code", "location", "named"),
    [
        ("", "empty-data", "data.jsonl", ()),
        ('{"text": "a", "label": 0}\n{"text": "a" "label": 0}', "invalid-json", "data.jsonl:2", ()),
        ("A man rides.\n", "invalid-json", "data.jsonl:1", ("language-modeling",)),
        ('["a", 0]', "not-an-object", "data.jsonl:1", ()),
        ('{"txet": "a", "label": 0}',
         "missing-column", "data.jsonl:1", ("'text'", ": txet, label", "'txet'?")),
        ('{"text": "a"}', "missing-column", "data.jsonl:1", ("'label'",)),
        ('{"text": 7, "label": 0}', "wrong-column-type", "data.jsonl:1", ("'text'", "7")),
        ('{"text": null, "label": 0}', "wrong-column-type", "data.jsonl:1", ("'text'", "None")),
        ('{"text": "a", "label": {"x": 1}}', "wrong-column-type", "data.jsonl:1", ("'label'",)),
        ('{"text": "a", "label": true}', "wrong-column-type", "data.jsonl:1", ("'label'", "True")),
        ('{"text": "a", "label": 0}\n{"text": "b", "label": 7}', "unknown-label", "data.jsonl:2", ("7",)),
        ('{"text": "a", "label": "LABEL_O"}', "unknown-label", "data.jsonl:1", ("'LABEL_O'", "'LABEL_")),
        ('{"text": "half \\ud83d", "label": 0}', "lone-surrogate", "data.jsonl:1", ("'text'", "'\\ud83d'")),
        ('{"text": "a", "label": 0}\n' + "\x1b[2J{", "invalid-json", "data.jsonl:2", ("\\x1b[2J",)),
        ('{"te\\u001b[31mxt": "a", "label": 0}', "missing-column", "data.jsonl:1", ("te\\x1b[31mxt, label",)),
        ('{"text": "a", "label": "\\u202eevil"}', "unknown-label", "data.jsonl:1", ("'\\u202eevil'",)),
    ],
)  # fmt: skip
def test_invalid_rows_are_rejected(home, rows, code, location, named):
    (home / "data.jsonl").write_text(rows)
    message = str(assert_refused(home, None, code, code))  # of train and of test
    assert f"{location}: " in message
    output = harness.smelt("plan", home / "recipe.yaml").output
    assert [value for value in named if value not in output] == []
    assert not set(output) & {"\x1b", "\u202e", "\0"}


def test_non_text_files_are_rejected(home):
    (home / "data.jsonl").write_bytes(b'{"text": "\xff\xfe", "label": 0}')
    assert "byte 10" in str(assert_refused(home, None, "not-utf8", "not-utf8"))
    (home / "data.csv").write_text("text,label\na,0\nb\n")
    csv = RECIPE.replace("data.jsonl", "data.csv")
    assert "data.csv:3: " in str(assert_refused(home, csv, "csv-field-count", "csv-field-count"))


@pytest.mark.parametrize(
    "row",
    ['{"source": "a", "target": ""}', '{"source": "a", "target": " \\n"}', '{"source": "a", "targets": []}',
     '{"source": "a", "targets": ["b", ""]}'],
)  # fmt: skip
def test_empty_target_is_rejected_with_line(home, row):
    with (home / "pairs.jsonl").open("a") as stream:
        stream.write(row + "\n")
    assert "pairs.jsonl:9: " in str(assert_refused(home, TRANSLATION_RECIPE, "empty-text", "empty-text"))


def test_references_of_wrong_type_are_rejected(home):
    (home / "pairs.jsonl").write_text('{"source": "a", "targets": "b"}\n')
    message = str(assert_refused(home, TRANSLATION_RECIPE, "wrong-column-type", "wrong-column-type"))
    assert all(value in message for value in ("pairs.jsonl:1: ", "'targets'", "'b'"))
    (home / "pairs.jsonl").write_text('{"source": ["a"], "target": "b"}\n')
    message = str(assert_refused(home, TRANSLATION_RECIPE, "wrong-column-type", "wrong-column-type"))
    assert all(value in message for value in ("pairs.jsonl:1: ", "'source'", "['a']"))


def test_too_long_texts_warn_or_fail_with_truncation_error(home):
    long_row = json.dumps({"text": "a man " * 40, "label": 1}) + "\n"
    with (home / "data.jsonl").open("a") as stream:
        stream.write(long_row)
    result = harness.smelt("run", home / "recipe.yaml", "--until", "model", "--out", home / "r", "--quiet")
    assert result.exit_code == 0, result.output
    report = json.loads((home / "r" / "report.json").read_text())
    [warning] = report["steps"][0]["warnings"]
    assert warning["code"] == "truncated-texts"
    assert re.findall(r"\d+", warning["message"])[:2] == ["1", "9"]
    assert warning["message"] in (home / "r" / "report.html").read_text().replace("&#39;", "'")
    error = assert_refused(
        home, RECIPE + "truncation: error\n", "texts-too-long", "texts-too-long", command="run"
    )
    train, test = (message.message for message in error.messages)
    assert all(value in train for value in ("data.jsonl (train): ", " 1 ", "32 tokens", "line 9."))
    assert all(value in test for value in ("data.jsonl (test): ", " 1 "))


def test_too_long_target_fails_with_truncation_error(home):
    with (home / "pairs.jsonl").open("a") as stream:
        stream.write(json.dumps({"source": "a man", "target": "ein mann " * 40}) + "\n")
    codes = ("texts-too-long", "texts-too-long")
    error = assert_refused(home, TRANSLATION_RECIPE + "truncation: error\n", *codes, command="run")
    assert all(value in error.messages[0].message for value in ("(train): ", " 1 ", "40 tokens", "line 9."))


def test_control_characters_in_data_are_accepted_and_shown_escaped(home):
    """Data may hold anything that is text; only what is shown is escaped."""
    texts = ["\x1b[31mred", "a\x00b\r\u2028", "\u202eright to left\u202c", "مرحبا بالعالم", "שלום", "\ufeff"]
    lines = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(texts)]
    (home / "data.jsonl").write_text("\n".join(lines))
    result = harness.smelt("run", home / "recipe.yaml", "--out", home / "r")
    assert result.exit_code == 0, result.output
    path = home / "r" / "report.json"
    report = json.loads(path.read_text())
    assert report["steps"][0]["quality"]["accuracy"]["n"] == 6
    message = make_message("said \x1b]0;owned\x07 \u202eevil שלום <b>", severity="error")
    report["steps"][1] |= {"status": "error", "error": message}
    path.write_text(json.dumps(report))
    result = harness.smelt("report", home / "r")
    assert result.exit_code == 0, result.output
    for output in (result.output, (home / "r/report.md").read_text(), (home / "r/report.html").read_text()):
        assert not set(output) & {"\x1b", "\x07", "\u202e"}
        assert "x1b" in output
    assert "שלום &lt;b&gt;" in (home / "r" / "report.html").read_text()
