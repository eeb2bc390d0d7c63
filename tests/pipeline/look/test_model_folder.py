"""Model folders: what is accepted, what is refused and with which words."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from smelt.core.errors import InputError
from smelt.look.model_folder import check_model_folder, fetch_model, local_folder


@pytest.fixture
def marian(tmp_path: Path) -> Path:
    folder = tmp_path / "marian"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "marian", "architectures": ["MarianMTModel"]})
    )
    save_file({"w": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    for name in ("source.spm", "target.spm", "vocab.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    folder.mkdir()
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def problem(folder: Path, task: str = "translation") -> str:
    [found] = check_model_folder(folder, task)[0]  # type: ignore[arg-type]
    return found


def test_whole_folders_are_accepted(marian: Path, bert: Path) -> None:
    assert check_model_folder(marian, "translation") == ([], [])
    assert check_model_folder(bert, "text-classification") == ([], [])


def test_missing_folder_names_the_nearest(marian: Path) -> None:
    found = problem(marian.parent / "marain")
    assert "no such folder; expected a model's folder with config.json, or a hub id." in found
    assert found.endswith("Did you mean 'marian'?")
    assert "not a folder" in problem(marian / "vocab.json")


def test_missing_weights(marian: Path) -> None:
    (marian / "model.safetensors").unlink()
    assert problem(marian) == f"{marian}: no weights in this folder; expected model.safetensors."


def test_a_stray_file_is_neither_the_weights_nor_in_their_way(marian: Path) -> None:
    (marian / "model.fp16.safetensors").write_bytes(b"not even one")
    assert check_model_folder(marian, "translation") == ([], [])
    (marian / "model.safetensors").unlink()
    assert problem(marian) == (
        f"{marian}: no weights in this folder; expected model.safetensors. There is model.fp16.safetensors;"
        " rename it if it holds the whole model."
    )


def test_weights_that_are_there_twice_are_a_warning_that_says_which_are_taken(marian: Path) -> None:
    """As `save_pretrained` in shards leaves the file that was there before."""
    (marian / "model.safetensors.index.json").write_text('{"weight_map": {"w": "gone.safetensors"}}')
    assert check_model_folder(marian, "translation") == (
        [],
        [
            f"{marian} holds weights in model.safetensors and in shards; model.safetensors.index.json is left"
            " aside, as transformers does."
        ],
    )


def test_pickle_weights_are_refused_with_the_way_to_convert(marian: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return pytest.fail, ("it was unpickled",)

    (marian / "model.safetensors").unlink()
    (marian / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    found = problem(marian)
    assert "the weights are pickle files (pytorch_model.bin), which can run any code" in found
    assert "save_pretrained(NEW, safe_serialization=True)" in found


def test_cut_weights_are_noticed(marian: Path) -> None:
    path = marian / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert problem(marian).endswith(
        f"cut short: {len(whole) - 1} of {len(whole)} bytes. Copy or download it again."
    )
    path.write_bytes(b"\x00\x01")
    assert "not a safetensors file" in problem(marian)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "a Git LFS pointer, not the weights. Fetch them with `git lfs pull`." in problem(marian)


def test_shards_must_all_be_there(marian: Path) -> None:
    (marian / "model.safetensors").rename(marian / "model-1.safetensors")
    index = marian / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    assert check_model_folder(marian, "translation") == ([], [])
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}))
    assert problem(marian) == (
        f"{marian / 'model-2.safetensors'}: this file of the weights is missing; model.safetensors.index.json"
        " names it. Copy or download it again."
    )
    save_file({"x": np.ones(2, np.float32)}, marian / "model-2.safetensors")
    assert problem(marian) == (
        f"{marian / 'model-2.safetensors'}: the tensor 'v' is not in this file, and"
        " model.safetensors.index.json says that it is. Copy or download it again."
    )
    index.write_text(json.dumps({"weight_map": {"w": "../model.safetensors"}}))
    assert "leads out of the folder" in problem(marian)
    index.write_text("[]")
    assert "not an index of weights" in problem(marian)


def test_config_must_be_there_and_readable(marian: Path) -> None:
    (marian / "config.json").write_text("{")
    assert "config.json: broken JSON" in problem(marian)
    (marian / "config.json").write_text("{}")
    assert "expected a JSON object with a model_type" in problem(marian)
    (marian / "config.json").unlink()
    assert problem(marian) == f"{marian}: no config.json in this folder, so it is not a model's folder."


def test_tokenizers_must_be_there(marian: Path, bert: Path) -> None:
    (marian / "target.spm").unlink()
    assert f"{marian}: no tokenizer: target.spm missing." in problem(marian)
    (bert / "tokenizer.json").unlink()
    assert f"{bert}: no tokenizer; expected tokenizer.json or vocab.txt." in problem(
        bert, "text-classification"
    )
    (bert / "vocab.txt").touch()
    assert check_model_folder(bert, "text-classification") == ([], [])


def test_family_must_fit_the_task(marian: Path) -> None:
    found = problem(marian, "text-classification")
    assert "a marian model is not supported for text-classification" in found
    assert found.endswith("Supported for text-classification: bert, distilbert, roberta, mpnet, modernbert.")


def test_a_config_that_its_family_cannot_follow_is_refused_for_every_task(bert: Path) -> None:
    rope = {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4}}
    named = ["ModernBertForSequenceClassification"]
    config = {"model_type": "modernbert", "architectures": named, "rope_parameters": rope}
    (bert / "config.json").write_text(json.dumps(config))
    assert "positions of type 'dynamic' (full_attention)" in problem(bert, "text-classification")


def test_encoder_without_classifier_is_warned_about(bert: Path) -> None:
    (bert / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    problems, [warning] = check_model_folder(bert, "text-classification")
    assert problems == []
    assert "has no classifier yet" in warning


def test_local_folder_tells_paths_from_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert local_folder("Helsinki-NLP/opus-mt-en-de", tmp_path) is None
    assert local_folder("models/misspelled", tmp_path) == tmp_path / "models/misspelled"
    assert local_folder("../x", tmp_path) == tmp_path / "../x"
    assert local_folder("plain", tmp_path) == tmp_path / "plain"


def test_fetch_model_checks_local_folders(marian: Path) -> None:
    assert fetch_model("marian", marian.parent, "translation") == marian
    (marian / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no weights"):
        fetch_model("marian", marian.parent, "translation")


def test_fetch_model_asks_the_hub_for_safe_files_only(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def download(model: str, allow_patterns: list[str]) -> str:
        if model == "a/gone":
            raise OSError("offline")
        asked.extend([model, *allow_patterns])
        return str(bert)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("smelt.look.model_folder.hub_lacks", lambda: None)
    assert fetch_model("a/b", bert.parent, "text-classification") == bert
    assert asked[0] == "a/b"
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in asked)
    with pytest.raises(
        InputError, match="a/gone: no such folder, and the hub does not give a model of that name: offline"
    ):
        fetch_model("a/gone", bert.parent, "text-classification")


@pytest.mark.parametrize(
    ("kind", "files", "expected"),
    [
        ("distilbert", ["vocab.txt"], []),
        ("distilbert", [], ["no tokenizer; expected tokenizer.json or vocab.txt."]),
        ("roberta", ["tokenizer.json"], []),
        ("roberta", ["vocab.json", "merges.txt"], []),
        ("roberta", ["vocab.json"], ["no tokenizer; expected tokenizer.json or vocab.json and merges.txt."]),
    ],
)
def test_each_family_of_classifiers_needs_its_own_tokenizer_files(
    bert: Path, kind: str, files: list[str], expected: list[str]
) -> None:
    (bert / "config.json").write_text(
        json.dumps({"model_type": kind, "architectures": ["XForSequenceClassification"]})
    )
    (bert / "tokenizer.json").unlink()
    for name in files:
        (bert / name).write_text("{}")
    found, _ = check_model_folder(bert, "text-classification")
    assert [text for text in found if not any(part in text for part in expected)] == []
    assert len(found) == len(expected)


def test_hub_ids_fail_in_seconds_when_there_is_no_network(tmp_path: Path, monkeypatch: Any) -> None:
    from huggingface_hub import constants

    from smelt.core import hub
    from smelt.core.data import Columns
    from smelt.core.rows.examples import read_split
    from smelt.look.model import look
    from smelt.look.model_folder import fetch_model

    never = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: never.wait(20))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(hub, "_asked", {})
    started = time.monotonic()
    for ask in (
        lambda: fetch_model("nobody/nothing", tmp_path, "translation"),
        lambda: look("nobody/nothing", base=tmp_path),
        lambda: read_split("nobody/nothing", "translation", Columns(), tmp_path),
    ):
        with pytest.raises(
            InputError, match=r"nobody/nothing: .*invalid cannot be reached from here \(no conn"
        ):
            ask()
    assert time.monotonic() - started < 12  # 3 for all; and `datasets` is imported
    never.set()
