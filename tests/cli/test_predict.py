"""The command `smelt predict`: words, lines and files in, lines and JSON out."""

import io
import json
import subprocess
import sys

import pytest

import smelt
from smelt.cli.commands import _stdin_lines
from smelt.cli.main import main
from smelt.core.errors import InputError
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny

LONG = " ".join(tiny.SENTENCES * 4)


@pytest.fixture(scope="module")
def artifact():
    return exported_artifacts.exported_artifact("translator")


def _predict(*arguments, code=0, lines=None):
    return harness.smelt("predict", *arguments, code=code, stdin=lines)


@pytest.fixture(scope="module")
def expected(artifact):
    with smelt.load(artifact) as model:
        return model.generate(tiny.SENTENCES, max_new_tokens=5)


def test_arguments_lines_and_files_give_equal_outputs(artifact, expected, tmp_path):
    options = ("--max-new-tokens", 5)
    assert _predict(artifact, *tiny.SENTENCES, *options).stdout.splitlines() == expected
    text_lines = "".join(f"{text}\n" for text in tiny.SENTENCES)
    assert _predict(artifact, *options, lines=text_lines).stdout.splitlines() == expected
    (tmp_path / "t.txt").write_text(text_lines)
    assert _predict(artifact, "--data", tmp_path / "t.txt", *options).stdout.splitlines() == expected
    (tmp_path / "d.csv").write_text("text\n" + text_lines)
    result = _predict(artifact, "--data", tmp_path / "d.csv", "--column", "text", *options)
    assert result.stdout.splitlines() == expected
    assert result.stderr == ""


def test_json_output_is_one_line_per_text(artifact, expected):
    lines = _predict(artifact, *tiny.SENTENCES, "--json", "--max-new-tokens", 5).stdout.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": text, "output": output} for text, output in zip(tiny.SENTENCES, expected, strict=True)
    ]


def test_truncated_texts_warn_on_standard_error(artifact):
    result = _predict(artifact, LONG, "a man", "--max-new-tokens", 2)
    assert result.stderr.startswith("warning: 1 of 2 texts ")
    assert "(40 tokens)" in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.parametrize(("arguments", "named"), [
    (("a man", "--data", "x.csv"), ("texts", "--data")),
    (("a man", "--column", "text"), ("--column", "--data")),
    (("--data", "nowhere.csv"), ("error[missing-file]: ", "nowhere.csv")),
    (("a man", "--seed", "1"), ("--seed", "--sample")), (("a man", "--batch-size", "0"), ("--batch-size",)),
])  # fmt: skip
def test_conflicting_arguments_are_rejected_with_exit_code_2(artifact, arguments, named):
    output = _predict(artifact, *arguments, code=2).stderr.rpartition("Error: ")[2]
    assert [value for value in named if value not in output] == []


def test_predict_command_imports_neither_torch_nor_transformers(artifact, expected):
    code = (
        "import sys, json\nfrom smelt.cli.main import main\n"
        f"sys.argv = ['smelt', 'predict', {str(artifact)!r}, *{tiny.SENTENCES!r}, '--max-new-tokens', '5']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(json.dumps(sorted({'torch', 'transformers', 'scipy', 'datasets'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, heavy = done.stdout.splitlines()
    assert (lines, json.loads(heavy), done.stderr) == (expected, [], "")


@pytest.mark.parametrize("terminal", [True, False])
def test_terminal_input_shows_hint(terminal, capsys):
    class Typed(io.StringIO):
        def isatty(self):
            return terminal

    assert _stdin_lines(Typed("a film\nan old film\n")) == ["a film", "an old film"]
    captured = capsys.readouterr()
    assert ("Ctrl-D" in captured.err, captured.out) == (terminal, "")


@pytest.mark.parametrize(("errors", "named"), [
    ("strict", ()),  # of most locales
    ("surrogateescape", ("line 2: ", "'M\\udce4rz'")),
])  # fmt: skip
def test_input_in_other_encoding_is_rejected(artifact, monkeypatch, capsys, errors, named):
    stream = io.TextIOWrapper(io.BytesIO(b"a man\nM\xe4rz\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stream)
    with pytest.raises(SystemExit) as done:
        main(["predict", str(artifact)])
    output = capsys.readouterr().err
    assert (done.value.code, output.startswith("error[not-utf8]: standard input")) == (2, True)
    assert [value for value in named if value not in output] == []


def test_closed_standard_input_is_rejected():
    with raises_code("closed-input", InputError):
        _stdin_lines(None)


def test_text_starting_with_dash_suggests_separator(artifact):
    result = _predict(artifact, "-5 degrees", code=2)
    assert "-- TEXT" in " ".join(result.output.split())
    separated = _predict(artifact, "--max-new-tokens", 5, "--", "-5 degrees")
    assert len(separated.stdout.splitlines()) == 1
