"""`smelt bench`: artifacts side by side, on texts of several kinds of files."""

import gzip
import json
import re
import shutil

import pytest
from transformers import AutoTokenizer

from smelt.api.load import Model
from smelt.api.timing import open_artifacts, read_samples, timing_table
from smelt.core.errors import InputError
from smelt.core.files import sha256_of, write_hashed_json
from smelt.data.splits import Example
from smelt.pipeline.execute import display
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.models import tiny
from tests.support.processes import forked_workers

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}
score: {latency: false}
"""
QUICK = ("--threads", 1, "--rounds", 3, "--texts", 2, "--batch-size", 1)


@pytest.fixture(scope="module", autouse=True)
def _forked():
    with pytest.MonkeyPatch.context() as patch:
        forked_workers.install(patch)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The artifacts of a run: a classifier and what pruning left of it."""
    home = tmp_path_factory.mktemp("home")
    tiny.write_bert(home / "m")
    tiny.write_labeled(home / "data.jsonl", 8)
    (home / "r.yaml").write_text(RECIPE)
    done = harness.smelt("run", home / "r.yaml", "--out", home / "run", "--quiet")
    assert done.exit_code == 0, done.output
    return home / "run" / "artifacts"


def _changed(artifact, folder, file, content):
    """Copy an artifact with another `file`, its manifest agreeing with it."""
    shutil.copytree(artifact, folder)
    (folder / file).write_text(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    size = (folder / file).stat().st_size
    manifest["files"][file] = {"sha256": sha256_of(folder / file), "size_bytes": size}
    write_hashed_json(folder / "manifest.json", manifest)
    return folder


def test_artifacts_are_timed_against_first_and_failures_are_named(run, tmp_path, monkeypatch):
    config = '{"model_type": "bert", "architectures": ["NoSuchModel"]}'
    broken = _changed(run / "prune", tmp_path / "broken", "config.json", config)
    data = run.parent.parent / "data.jsonl"
    monkeypatch.setattr(display, "_PLAIN_LINE_SECONDS", 0.0)
    result = harness.smelt("bench", run / "model", run / "prune", broken, *QUICK, "--data", data, "--json")
    assert result.exit_code == 1, result.output
    content = json.loads(result.stdout)
    assert re.search(r"\b1/\d+\b", result.stderr)  # the progress, apart from the JSON
    assert content["baseline"] == "model"
    assert content["texts"] == {"from": str(data), "n": 8}
    assert list(content["artifacts"]) == ["model", "prune", "broken"]
    error = content["artifacts"]["broken"]["error"]
    assert (error["code"], "NoSuchModel" in error["message"]) == ("unknown-architecture", True)
    assert content["artifacts"]["broken"]["latency"] == []
    for name in ("model", "prune"):
        artifact = content["artifacts"][name]
        (row,) = artifact["latency"]
        assert (row["batch_size"], row["threads"]) == (1, 1)
        assert row["p50_ms"] > 0
        assert (artifact["error"], artifact["device"]) == (None, "cpu")
        assert artifact["runner"].startswith("torch")
        assert json.loads((run / name / "manifest.json").read_text())["key"] == artifact["key"]
    assert content["artifacts"]["model"]["latency"][0]["speedup"] == 1
    low, high = content["artifacts"]["prune"]["latency"][0]["speedup_ci95"]
    assert low <= content["artifacts"]["prune"]["latency"][0]["speedup"] <= high
    table = timing_table(content)
    assert max(map(len, table.splitlines())) <= 80
    assert "8 texts" in table
    assert "broken: " in table


def test_equal_names_are_distinguished_by_run(run, tmp_path):
    other = tmp_path / "other" / "artifacts"
    other.mkdir(parents=True)
    (other / "prune").symlink_to(run / "prune")
    assert list(open_artifacts([run / "model", run / "prune"])) == ["model", "prune"]
    assert list(open_artifacts([run / "prune", other / "prune"])) == ["run/prune", "other/prune"]


def test_texts_are_read_from_lines_or_column(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("three\n")
    (tmp_path / "c.csv").write_text("text,text_pair,stars\ngood film,seen twice,5\nbad film,,1\n")
    (tmp_path / "d.jsonl").write_text('{"en": "a", "de": "b"}\n')
    assert read_samples(tmp_path / "a.txt", "translation") == [Example("one"), Example("two")]
    assert read_samples(tmp_path / "b.txt.gz", "translation") == [Example("three")]
    pairs = [Example("good film", text_pair="seen twice"), Example("bad film")]
    assert read_samples(tmp_path / "c.csv", "text-classification") == pairs
    assert read_samples(tmp_path / "d.jsonl", "translation", ("de",)) == [Example("b")]
    with raises_code("missing-column", InputError) as excinfo:
        read_samples(tmp_path / "d.jsonl", "translation", ("dee",))
    assert (excinfo.value.file, excinfo.value.line) == (str(tmp_path / "d.jsonl"), 1)
    (tmp_path / "e.txt").write_text("\n")
    with raises_code("empty-data", InputError):
        read_samples(tmp_path / "e.txt", "translation")


@pytest.mark.parametrize("callers", [(), ("--callers", 1, "--requests", 4)])
def test_both_texts_of_pairs_are_timed(run, tmp_path, monkeypatch, callers):
    """The time of a classifier of pairs is that of both texts."""
    sent = []
    pair = ("a good film", "seen two times")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"first": pair[0], "second": pair[1]}))
    columns = ("--column", "first", "--column", "text_pair=second")
    monkeypatch.setattr(Model, "predict", lambda model, texts: sent.extend(texts))
    options = (*callers, "--rounds", 3, "--threads", 1) if callers else QUICK
    done = harness.smelt(
        "bench", run / "model", "--data", tmp_path / "pairs.jsonl", *columns, *options, "--json"
    )
    assert done.exit_code == 0, done.output
    if callers:
        assert set(sent) == {pair}
        return
    (row,) = json.loads(done.stdout)["artifacts"]["model"]["latency"]
    assert row["input_tokens"] == len(AutoTokenizer.from_pretrained(run / "model")(*pair)["input_ids"])


def test_incomparable_artifacts_are_rejected(run, tmp_path):
    translator = tmp_path / "t"
    shutil.copytree(run / "model", translator)
    manifest = json.loads((translator / "manifest.json").read_text())
    write_hashed_json(translator / "manifest.json", manifest | {"task": "translation"})
    mixed = command_error(harness.smelt("bench", run / "model", translator, code=2))
    assert (mixed.code, "model is for text-classification" in str(mixed)) == ("different-tasks", True)
    for arguments, code in (
        ((run / "model", run / "model"), "duplicate-artifact"),
        ((tmp_path / "nowhere",), "missing-folder"),
        ((run / "model", "--data", tmp_path / "no.txt"), "missing-file"),
    ):
        assert command_error(harness.smelt("bench", *arguments, code=2)).code == code
    assert harness.smelt("bench").exit_code == 2


def test_timing_table_fits_80_columns():
    row = {
        "batch_size": 1,
        "texts": 8,
        "threads": 2,
        "p50_ms": 123456.0,
        "p90_ms": 1.234,
        "throughput": 12345.0,
    }
    row |= {"unit": "sentences/s", "speedup": 123.4, "speedup_ci95": [100.0, 234.56]}
    row |= {"stable": False, "reason": "the rounds disagree: from 1.00× to 200.00×"}
    row["parts"] = {"tokenizing_ms": 0.123, "encoding_ms": 12345.6, "time_to_first_token_ms": 1.0}
    row["parts"] |= {"time_per_output_token_ms": None, "further_tokens": 0.0, "detokenizing_ms": 2.0}
    row["graph_ms"] = 78.91
    artifact = {"latency": [row], "error": None, "device": "cpu", "gpu_memory_bytes": 1_500_000_000}
    table = timing_table(
        {
            "baseline": "x" * 60,
            "task": "translation",
            "texts": {"from": "standard", "n": 12},
            "settings": {"batch_sizes": [1]},
            "environment": {"cpu": "Some Processor @ 2 GHz"},
            "artifacts": {"x" * 60: artifact, "y" * 60: artifact},
        }
    )
    assert max(map(len, table.splitlines())) <= 80
    assert "123? [100, 235]" in table
    text = " ".join(table.split())
    assert text.count("the rounds disagree: from 1.00× to 200.00×") == 1  # what doubts two alike is said once
    assert "8 of 12 texts (standard)" in text
    (row_line,) = (line for line in table.splitlines() if line.startswith("y") and "0.12" in line)
    assert row_line.split()[1:] == ["0.12", "12,346", "1.00", "–", "2.00"]
    assert "1.23" in table
    assert text.count(f"{'y' * 60} 78.9") == 1
    assert text.count(f"{'y' * 60} 1,500") == 1
