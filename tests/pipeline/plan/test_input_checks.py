"""Models, data files and their parts, looked at before any work."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from tests.support.expected_errors import message_locations
from tests.support.standins.stage_stand_ins import RECIPE_HEAD, plan_errors, plan_stages

pytest_plugins = ["tests.support.standins.stage_stand_ins"]
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("stand_ins")]


def test_tokenizer_that_cannot_split_references_is_rejected(folder: Path) -> None:
    rows = [{"source": f"a man {n}", "target": f"一个男人在街上骑自行车{n}。"} for n in range(4)]
    (folder / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert "bleu (zh)" in str(plan_stages(folder, "[prune]", head=RECIPE_HEAD))
    text = RECIPE_HEAD + "score: {quality: [{bleu: {tokenize: 13a}}]}\n"
    errors = plan_errors(folder, "[prune]", head=text)
    assert message_locations(errors) == [("bleu-tokenizer", "score.quality[0].bleu.tokenize", 4)]


def test_splits_of_one_file_are_planned(folder: Path) -> None:
    head = (
        "model: model\ntask: translation\ndata: {train: train.jsonl, split: {test: 0.1, validation: 0.05}}\n"
    )
    plan = plan_stages(folder, "[prune]", head=head)
    assert {name: len(rows) for name, rows in plan.splits.items()} == {
        "train": 102,
        "validation": 6,
        "test": 12,
    }
    (line,) = [line for line in str(plan).splitlines() if line.startswith("test ")]
    assert re.findall(r"\d+", line) == ["10", "0", "12"]  # per cent of train, seed, samples
    assert list(plan.read_data(5)) == ["train", "validation", "test"]
    texts = [{e.text for e in rows.examples} for rows in plan.splits.values()]
    assert sum(map(len, texts)) == len(set.union(*texts))
    second_plan = plan_stages(folder, "[]", "seed=1", head=head)
    assert second_plan.splits["test"].fingerprint != plan.splits["test"].fingerprint
    large = plan_stages(folder, "[prune]", head=head)
    assert large.read_data()["train"].fingerprint == plan.splits["train"].fingerprint


@pytest.mark.parametrize(("data", "code", "setting"), [
    ("{train: train.jsonl}", "missing-setting", "data.test"),
    ("{split: {test: 0.1}}", "missing-data", "data.split"),
    ("{train: train.jsonl, split: {validation: 0.1}}", "missing-setting", "data.test"),
    ("{train: train.jsonl, test: test.jsonl, split: {test: 0.1}}", "settings-conflict", "data.split.test"),
    ("{train: train.jsonl, split: {test: 1}}", "wrong-value", "data.split.test"),
    ("{train: train.jsonl, split: {test: 0.5, validation: 0.5}}", "shares-too-large", "data.split"),
    ("{train: train.jsonl, split: {calibration: 0.5, test: 0.1}}", "unknown-setting",
     "data.split.calibration"),
    ("{train: few.jsonl, split: {test: 0.1}}", "too-few-texts", "data.train"),
])  # fmt: skip
def test_impossible_splits_are_rejected(folder: Path, data: str, code: str, setting: str) -> None:
    (folder / "few.jsonl").write_text('{"source": "a", "target": "b"}\n' * 9)
    errors = plan_errors(folder, "[]", head=f"model: model\ntask: translation\ndata: {data}\n")
    assert message_locations(errors) == [(code, setting, 3)]


@pytest.mark.parametrize(("name", "content", "code", "named"), [
    ("model", None, "not-a-file", "'test'"), ("tset.jsonl", None, "missing-file", "'test.jsonl'?"),
    ("empty.jsonl", b"", "empty-data", "empty.jsonl"),
    # a time of 0: the id of a test must be the same in every process
    ("broken.jsonl.gz", gzip.compress(b"x" * 99, mtime=0)[:-12], "unreadable-file", "broken.jsonl.gz"),
    ("garbage.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00garbage", "unreadable-file",
     "garbage.jsonl.gz"),
    ("odd.xyz", b"a", "unknown-file-type", "'.xyz'"),
])  # fmt: skip
def test_invalid_data_files_are_rejected(
    folder: Path, name: str, content: bytes | None, code: str, named: str
) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    [error] = plan_errors(folder, "[]", f"data.test={name}")
    assert message_locations([error]) == [(code, "data.test", None)]
    assert error.message.startswith(f"--set data.test={name}: ")
    assert named in error.message


@pytest.mark.parametrize(
    ("model", "code", "named"),
    [("modle", "missing-folder", "'model'?"), ("''", "empty-text", ""), ("m.onnx", "missing-file", "m.onnx")],
)
def test_invalid_models_are_rejected(folder: Path, model: str, code: str, named: str) -> None:
    [error] = plan_errors(folder, "[]", head=RECIPE_HEAD.replace("model: model", f"model: {model}"))
    assert message_locations([error]) == [(code, "model", 1)]
    assert named in error.message


def test_hub_ids_are_not_checked_by_plan(folder: Path) -> None:
    plan = plan_stages(folder, "[]", "model=someone/something", "data.train=someone/rows")
    assert plan.local_model is None
    [note] = plan.notes
    assert (note.code, note.severity) == ("from-the-hub", "info")
    assert "'someone/something'" in note.message
    assert f"note {note.message}" in " ".join(str(plan).split())
    assert plan.warnings == ()
    assert list(plan.splits) == ["test"]


def test_read_data_returns_all_splits_up_to_limit(folder: Path) -> None:
    splits = plan_stages(folder, "[]").read_data(limit=2)
    assert {name: len(split) for name, split in splits.items()} == {"train": 2, "test": 2}
    assert splits["train"].examples[1].text == "a 60"  # they are spread over the file
