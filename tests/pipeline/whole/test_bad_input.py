"""Whatever is wrong with what a user brings is said in words, with exit code 2 and without a traceback."""

import json

import harness
import pytest
from refused_recipes import RECIPE, TRANSLATE, refused

pytest_plugins = ["refused_recipes"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", ("data.jsonl: no rows in this file",)),
        ('{"text": "a", "label": 0}\n{"text": "a" "label": 0}', ("data.jsonl:2: broken JSON",)),
        ("A man rides.\n", ("data.jsonl:1: broken JSON", "Plain text (.txt) is for language-modeling.")),
        ('["a", 0]', ("data.jsonl:1: expected a JSON object with named columns",)),
        ('{"txet": "a", "label": 0}', ("data.jsonl:1: no column 'text'; there are: txet, label", "'txet'?")),
        ('{"text": "a"}', ("no column 'label'",)),
        ('{"text": 7, "label": 0}', ("data.jsonl:1: column 'text' must be text, read 7",)),
        ('{"text": null, "label": 0}', ("column 'text' must be text, read None",)),
        ('{"text": "a", "label": {"x": 1}}', ("column 'label' must be",)),
        ('{"text": "a", "label": true}', ("column 'label' must be", "read True")),
        ('{"text": "a", "label": 0}\n{"text": "b", "label": 7}', ("data.jsonl:2: the label 7 is not one of the model's",)),  # noqa: E501
        ('{"text": "a", "label": "LABEL_O"}', ("the label 'LABEL_O'", "Did you mean 'LABEL_")),
        ('{"text": "half \\ud83d", "label": 0}', ("column 'text' holds '\\ud83d', half of a surrogate pair",)),  # noqa: E501
        ('{"text": "a", "label": 0}\n' + "\x1b[2J{", ("data.jsonl:2: broken JSON", "\\x1b[2J")),
        ('{"te\\u001b[31mxt": "a", "label": 0}', ("there are: te\\x1b[31mxt, label",)),
        ('{"text": "a", "label": "\\u202eevil"}', ("the label '\\u202eevil'",)),
    ],
)  # fmt: skip
def test_rows_that_are_none(home, rows, words):
    (home / "data.jsonl").write_text(rows)
    said = refused(home, None, *words)
    assert not set(said) & {"\x1b", "\u202e", "\0"}


def test_files_that_are_no_text(home):
    (home / "data.jsonl").write_bytes(b'{"text": "\xff\xfe", "label": 0}')
    refused(home, None, "data.jsonl: not UTF-8 text at byte 10. Convert the file to UTF-8.")
    (home / "data.csv").write_text("text,label\na,0\nb\n")
    refused(home, RECIPE.replace("data.jsonl", "data.csv"), "data.csv:3: this row has 1 fields")


@pytest.mark.parametrize(
    "row",
    ['{"source": "a", "target": ""}', '{"source": "a", "target": " \\n"}', '{"source": "a", "targets": []}',
     '{"source": "a", "targets": ["b", ""]}'],
)  # fmt: skip
def test_an_empty_target_is_refused_with_its_line(home, row):
    with (home / "pairs.jsonl").open("a") as stream:
        stream.write(row + "\n")
    refused(home, TRANSLATE, "pairs.jsonl:9: the target is empty; a model would learn to say nothing")


def test_references_in_the_wrong_type_are_refused(home):
    (home / "pairs.jsonl").write_text('{"source": "a", "targets": "b"}\n')
    refused(home, TRANSLATE, "pairs.jsonl:1: column 'targets' must be a list of texts, read 'b'")
    (home / "pairs.jsonl").write_text('{"source": ["a"], "target": "b"}\n')
    refused(home, TRANSLATE, "pairs.jsonl:1: column 'source' must be text, read ['a']")


def test_texts_beyond_the_limit_are_a_warning_and_with_strict_an_error(home):
    long = json.dumps({"text": "a man " * 40, "label": 1}) + "\n"
    with (home / "data.jsonl").open("a") as stream:
        stream.write(long)
    result = harness.smelt("run", home / "recipe.yaml", "--until", "model", "--out", home / "r", "--quiet")
    assert result.exit_code == 0, result.output
    report = json.loads((home / "r" / "report.json").read_text())
    said = "1 of 9 texts was longer than the model's limit and was cut"
    assert report["steps"][0]["warnings"] == [said]
    assert said in (home / "r" / "report.html").read_text().replace("&#39;", "'")
    refused(
        home, RECIPE + "strict: true\n",
        "data.jsonl (train): 1 row holds texts of more than 32 tokens, the model's limit (strict: true): line 9.",  # noqa: E501
        "data.jsonl (test): 1 row ", command="run",
    )  # fmt: skip


def test_a_target_beyond_the_limit_is_too_long_under_strict_too(home):
    with (home / "pairs.jsonl").open("a") as stream:
        stream.write(json.dumps({"source": "a man", "target": "ein mann " * 40}) + "\n")
    words = ("(train): 1 row holds texts of more than 40 tokens", "line 9.")
    refused(home, TRANSLATE + "strict: true\n", *words, command="run")


def test_controls_and_right_to_left_text_pass_through_and_are_shown_escaped(home):
    """Data may hold anything that is text; only what is shown is escaped."""
    odd = [
        "\x1b[31mred",
        "a\x00b\r\u2028",
        "\u202eright to left\u202c",
        "مرحبا بالعالم",
        "שלום",
        "\ufeff",
    ]
    lines = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(odd)]
    (home / "data.jsonl").write_text("\n".join(lines))
    result = harness.smelt("run", home / "recipe.yaml", "--out", home / "r")
    assert result.exit_code == 0, result.output
    path = home / "r" / "report.json"
    report = json.loads(path.read_text())
    assert report["steps"][0]["quality"]["accuracy"]["n"] == 6
    report["steps"][1] |= {"status": "error", "error": "said \x1b]0;owned\x07 \u202eevil שלום <b>"}
    path.write_text(json.dumps(report))
    result = harness.smelt("report", home / "r")
    assert result.exit_code == 0, result.output
    for shown in (result.output, (home / "r/report.md").read_text(), (home / "r/report.html").read_text()):
        assert not set(shown) & {"\x1b", "\x07", "\u202e"}
        assert "x1b" in shown
    assert "שלום &lt;b&gt;" in (home / "r" / "report.html").read_text()
