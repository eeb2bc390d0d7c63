"""`smelt score`: texts of other programs have sacrebleu's scores, and its paired test's p-values."""

import gzip
import json
import random
import subprocess
import sys

import pytest
from click.testing import CliRunner
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from smelt.api.score_files import score_files
from smelt.cli.main import main
from smelt.core.errors import InputError
from tests.support import harness
from tests.support.expected_errors import raises_code

WORDS = ["a", "man", "and", "dog", "run", "over", "green", "grass", "near", "fence", "river", "hat"]
DRAW = random.Random(0)
REFERENCES = [" ".join(DRAW.choices(WORDS, k=DRAW.randint(8, 20))) for _ in range(60)]


def changed(share):
    """Return the references with about this share of their words replaced."""
    return [
        " ".join(DRAW.choice(WORDS) if DRAW.random() < share else name for name in text.split())
        for text in REFERENCES
    ]


HYPOTHESES, BASELINE = changed(0.15), changed(0.2)


@pytest.fixture
def write(tmp_path):
    def write_lines(name, texts, end="\n"):
        path = tmp_path / name
        data = "".join(text + end for text in texts).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write_lines


def test_scores_and_p_values_are_sacrebleus(write):
    paths = [write("hypotheses.txt", HYPOTHESES), [write("references.txt", REFERENCES)]]
    scores = score_files(*paths, baseline=write("baseline.txt", BASELINE))
    metrics = {"bleu": BLEU(references=[REFERENCES]), "chrf": CHRF(references=[REFERENCES])}
    test = PairedTest(
        [("baseline", BASELINE), ("hypotheses", HYPOTHESES)], metrics, None, test_type="ar", n_samples=10_000
    )
    _, results = test()
    assert list(scores) == ["bleu", "chrf"]
    for (name, entry), key in zip(scores.items(), [key for key in results if key != "System"], strict=True):
        baseline, hypotheses = results[key]
        assert entry["value"] == pytest.approx(hypotheses.score, abs=1e-9), name
        assert entry["baseline"] == pytest.approx(baseline.score, abs=1e-9)
        compared = entry["against_baseline"]
        assert compared["difference"] == pytest.approx(hypotheses.score - baseline.score, abs=1e-9)
        assert compared["p_value"] == pytest.approx(hypotheses.p_value, abs=0.02)
        low, high = compared["ci95"]
        assert low < compared["difference"] < high
    assert max(entry["against_baseline"]["p_value_holm"] for entry in scores.values()) <= 1


def test_several_references_compressed_files_and_line_ends_are_read(write):
    references = [write("a.txt.gz", REFERENCES), write("b.txt", HYPOTHESES, end="\r\n")]
    [entry] = score_files(write("hypotheses.txt", HYPOTHESES), references, ["exact_match"]).values()
    assert (entry["value"], entry["n"]) == (100, 60)


def test_language_chooses_tokenizer_of_bleu(write):
    texts = [write("hypotheses.txt", ["他们骑马"] * 10), [write("references.txt", ["他们骑马过河"] * 10)]]
    [entry] = score_files(*texts, ["bleu"], language="zh").values()
    assert "tok:zh" in entry["signature"]
    [entry] = score_files(*texts, ["bleu: {tokenize: char}"]).values()
    assert "tok:char" in entry["signature"]


@pytest.mark.parametrize("name", ["references.txt", "baseline.txt"])
def test_different_numbers_of_lines_are_rejected(name, write):
    files = {n: write(n, REFERENCES) for n in ("hypotheses.txt", "references.txt", "baseline.txt")}
    write(name, REFERENCES[1:])
    with raises_code("count-mismatch", InputError) as caught:
        score_files(
            files["hypotheses.txt"], [files["references.txt"]], ["chrf"], baseline=files["baseline.txt"]
        )
    assert caught.value.file == str(files[name])


def test_line_separators_of_unicode_do_not_end_lines(write):
    texts = ["a\u2028b\x85c", "d\re"]
    [entry] = score_files(write("a.txt", texts), [write("b.txt", texts)], ["exact_match"]).values()
    assert entry["n"] == 2


@pytest.mark.parametrize(
    ("data", "metric", "code"),
    [(b"", "bleu", "empty-data"), (b"\xff\n", "bleu", "not-utf8"), (None, "bleu", "unreadable-file"),
     (b"a\n", "accuracy", "unknown-metric"), (b"a\n", "comet", "unknown-metric"),
     (b"a\n", "bleu: {tokenize: 13b}", "wrong-value")],
)  # fmt: skip
def test_unreadable_texts_and_unknown_metrics_are_rejected(data, metric, code, tmp_path, write):
    path = tmp_path / "hypotheses.txt"
    if data is not None:
        path.write_bytes(data)
    with raises_code(code, InputError):
        score_files(path, [write("references.txt", ["a"])], [metric])


def test_text_without_reference_is_rejected_with_line(write):
    texts, references = write("h.txt", ["a", "b"]), [write("r.txt", ["a", " "]), write("s.txt", ["", ""])]
    with raises_code("missing-references", InputError) as caught:
        score_files(texts, references)
    assert (caught.value.file, caught.value.line) == (str(references[0]), 2)
    assert score_files(texts, [references[0], write("t.txt", ["a", "b"])])


def test_data_files_and_names_of_languages_are_rejected(write):
    texts = write("h.txt", ["a"])
    with raises_code("wrong-format", InputError):
        score_files(write("h.jsonl.gz", ['{"target": "a"}']), [texts])
    with raises_code("wrong-value", InputError):
        score_files(texts, [texts], language="german")


@pytest.mark.parametrize("option", ["--hypotheses", "--baseline"])
def test_option_of_one_file_is_not_repeated(option, write):
    texts = write("h.txt", ["a b"])
    others = () if option == "--hypotheses" else ("--hypotheses", texts)
    result = harness.smelt("score", "--references", texts, option, texts, option, texts, *others, code=2)
    assert (result.error.code, result.error.setting) == ("repeated-option", option)


def test_command_prints_scores_and_differences(write):
    arguments = ["score", "--hypotheses", str(write("h.txt", HYPOTHESES)), "--metric", "chrf"]
    arguments += [
        "--references",
        str(write("r.txt", REFERENCES)),
        "--baseline",
        str(write("b.txt", BASELINE)),
    ]
    as_json = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    scores = json.loads(as_json.output)
    printed = CliRunner().invoke(main, arguments, catch_exceptions=False).output
    entry = scores["chrf"]
    for value in (entry["value"], entry["baseline"], entry["against_baseline"]["difference"]):
        assert f"{value:.2f}" in printed


def test_scoring_texts_imports_no_torch(write):
    texts = str(write("h.txt", HYPOTHESES))
    code = (
        "import sys; from pathlib import Path; from smelt.api.score_files import score_files\n"
        f"score_files(Path({texts!r}), [Path({texts!r})])\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
