"""Models, data files and their parts, looked at before any work."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from planning import HEAD, mistakes, plan

pytest_plugins = ["planning"]
pytestmark = pytest.mark.usefixtures("stand_ins")


def test_a_tokenizer_that_cannot_split_the_references_is_refused(folder: Path) -> None:
    rows = [{"source": f"a man {n}", "target": f"一个男人在街上骑自行车{n}。"} for n in range(4)]
    (folder / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert "bleu (zh)" in str(plan(folder, "[prune]", head=HEAD))
    text = HEAD + "score: {quality: [{bleu: {tokenize: 13a}}]}\n"
    [mistake] = mistakes(folder, "[prune]", head=text)
    assert "score.quality[0].bleu.tokenize" in mistake


def test_parts_of_one_file_are_planned(folder: Path) -> None:
    head = (
        "model: model\ntask: translation\ndata: {train: train.jsonl, split: {test: 0.1, validation: 0.05}}\n"
    )
    made = plan(folder, "[prune]", head=head)
    assert {name: len(rows) for name, rows in made.splits.items()} == {
        "train": 102,
        "validation": 6,
        "test": 12,
    }
    assert "test        10 % of train, seed 0 (12 rows)" in str(made)
    assert list(made.read_data(5)) == ["train", "validation", "test"]
    texts = [{e.text for e in rows.examples} for rows in made.splits.values()]
    assert sum(map(len, texts)) == len(set.union(*texts))
    again = plan(folder, "[]", "seed=1", head=head)
    assert again.splits["test"].fingerprint != made.splits["test"].fingerprint
    large = plan(folder, "[prune]", head=head)
    assert large.read_data()["train"].fingerprint == made.splits["train"].fingerprint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "{train: train.jsonl}",
            "data.test: missing; expected a file or a hub id (or beside train, `split: {test",
        ),
        ("{split: {test: 0.1}}", "data.split: takes rows out of train, and there is no train: name a file."),
        ("{train: train.jsonl, split: {validation: 0.1}}", "data.test: missing; expected a file"),
        (
            "{train: train.jsonl, test: test.jsonl, split: {test: 0.1}}",
            "data.split.test: 'test' has a file of its own. Remove one of the two.",
        ),
        ("{train: train.jsonl, split: {test: 1}}", "data.split.test: expected a number between 0 and 1"),
        (
            "{train: train.jsonl, split: {test: 0.5, validation: 0.5}}",
            "data.split: the shares leave nothing to train on; together they must be less than 1.",
        ),
        (
            "{train: train.jsonl, split: {calibration: 0.5, test: 0.1}}",
            "data.split.calibration: unknown; known here",
        ),
        ("{train: few.jsonl, split: {test: 0.1}}", "1 different texts cannot be divided into 2 splits."),
    ],
)
def test_splits_that_cannot_be_are_told(folder: Path, data: str, message: str) -> None:
    (folder / "few.jsonl").write_text('{"source": "a", "target": "b"}\n' * 9)
    [found] = mistakes(folder, "[]", head=f"model: model\ntask: translation\ndata: {data}\n")
    assert message in found


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model", None, "model: a folder, not a file of rows (data for 'test')."),
        ("tset.jsonl", None, "tset.jsonl: no such file (data for 'test'). Did you mean 'test.jsonl'?"),
        ("empty.jsonl", b"", "no rows in this file"),
        # a time of 0: the id of a test must be the same in every process
        ("broken.jsonl.gz", gzip.compress(b"x" * 99, mtime=0)[:-12], "cannot be read"),
        ("garbage.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00garbage", "cannot be read"),
        ("odd.xyz", b"a", "unknown kind of file '.xyz'"),
    ],
)
def test_data_files_are_checked(folder: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    [found] = mistakes(folder, "[]", f"data.test={name}")
    assert found.startswith(f"--set data.test={name}: data.test: ")
    assert message in found


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "modle",
            "no such folder; expected a model's folder with config.json, or a hub id. Did you mean 'model'?",
        ),
        ("''", "expected a model's folder or a hub id, read an empty name."),
        ("m.onnx", "m.onnx: no such file; expected an ONNX model."),
    ],
)
def test_models_are_checked(folder: Path, model: str, message: str) -> None:
    [found] = mistakes(folder, "[]", head=HEAD.replace("model: model", f"model: {model}"))
    assert found.startswith("1: model: ")
    assert message in found


def test_hub_ids_are_left_to_the_run(folder: Path) -> None:
    made = plan(folder, "[]", "model=someone/something", "data.train=someone/rows")
    assert made.local_model is None
    assert made.notes == ("'someone/something' is no folder here; the run fetches it from the hub.",)
    assert "note        'someone/something' is no folder" in str(made)
    assert made.warnings == ()
    assert list(made.splits) == ["test"]


def test_read_data_gives_all_splits_and_limits_them(folder: Path) -> None:
    splits = plan(folder, "[]").read_data(limit=2)
    assert {name: len(split) for name, split in splits.items()} == {"train": 2, "test": 2}
    assert splits["train"].examples[1].text == "a 60"  # they are spread over the file
