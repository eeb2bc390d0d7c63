"""Model folders: what is accepted, what is refused and with which words."""

from __future__ import annotations

import json
import pickle
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.tasks import TASK_TRAITS
from smelt.models.families.registry import FAMILIES
from smelt.pipeline.inspect.find_model import fetch_model, local_model_folder
from smelt.pipeline.inspect.model_folder import check_model_folder, check_tokenizer_files
from tests.support.expected_errors import raises_code


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


def problem(folder: Path, task: str = "translation") -> tuple[str, str]:
    """Return code and text of the one thing that is wrong."""
    [error] = check_model_folder(folder, task)[0]  # type: ignore[arg-type]
    return error.code, error.message


def test_complete_model_folders_are_accepted(marian: Path, bert: Path) -> None:
    assert check_model_folder(marian, "translation") == ([], [])
    assert check_model_folder(bert, "text-classification") == ([], [])


def test_encoder_without_head_of_task_is_rejected(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose models are neither classifiers of a sample nor bare encoders."""
    traits = replace(TASK_TRAITS["sentence-similarity"], auto_class="AutoModelForTokenClassification")
    monkeypatch.setitem(TASK_TRAITS, "sentence-similarity", traits)
    assert problem(bert, "sentence-similarity")[0] == "unsupported-architecture"
    config = {"model_type": "bert", "architectures": ["BertForTokenClassification"]}
    (bert / "config.json").write_text(json.dumps(config))
    assert check_model_folder(bert, "sentence-similarity") == ([], [])


def test_missing_folder_suggests_nearest_name(marian: Path) -> None:
    code, text = problem(marian.parent / "marain")
    assert code == "missing-folder"
    assert "'marian'?" in text
    assert problem(marian / "vocab.json")[0] == "not-a-folder"


def test_missing_weights_are_rejected(marian: Path) -> None:
    (marian / "model.safetensors").unlink()
    code, text = problem(marian)
    assert code == "missing-weights"
    assert str(marian) in text


def test_unrelated_safetensors_file_is_ignored(marian: Path) -> None:
    (marian / "model.fp16.safetensors").write_bytes(b"not even one")
    assert check_model_folder(marian, "translation") == ([], [])
    (marian / "model.safetensors").unlink()
    code, text = problem(marian)
    assert code == "missing-weights"
    assert "model.fp16.safetensors" in text


def test_weights_stored_twice_warn_and_name_used_file(marian: Path) -> None:
    """As `save_pretrained` in shards leaves the file that was there before."""
    (marian / "model.safetensors.index.json").write_text('{"weight_map": {"w": "gone.safetensors"}}')
    problems, [warning] = check_model_folder(marian, "translation")
    assert problems == []
    assert (warning.code, warning.severity) == ("weights-stored-twice", "warning")
    assert "model.safetensors.index.json" in warning.message


def test_pickled_weights_are_rejected_with_conversion_hint(marian: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return pytest.fail, ("it was unpickled",)

    (marian / "model.safetensors").unlink()
    (marian / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    code, text = problem(marian)
    assert code == "pickled-weights"
    assert all(
        value in text for value in ("(pytorch_model.bin)", "save_pretrained(NEW, safe_serialization=True)")
    )


def test_truncated_weights_are_rejected(marian: Path) -> None:
    path = marian / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    code, text = problem(marian)
    assert code == "truncated-file"
    assert f"{len(content) - 1} of {len(content)} bytes" in text
    path.write_bytes(b"\x00\x01")
    assert problem(marian)[0] == "damaged-weights"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    code, text = problem(marian)
    assert code == "lfs-pointer"
    assert "`git lfs pull`" in text


def test_missing_shards_are_rejected(marian: Path) -> None:
    (marian / "model.safetensors").rename(marian / "model-1.safetensors")
    index = marian / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    assert check_model_folder(marian, "translation") == ([], [])
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}))
    code, text = problem(marian)
    assert code == "missing-file"
    assert all(name in text for name in (str(marian / "model-2.safetensors"), "model.safetensors.index.json"))
    save_file({"x": np.ones(2, np.float32)}, marian / "model-2.safetensors")
    code, text = problem(marian)
    assert code == "missing-tensor"
    assert all(name in text for name in (str(marian / "model-2.safetensors"), "'v'"))
    index.write_text(json.dumps({"weight_map": {"w": "../model.safetensors"}}))
    assert problem(marian)[0] == "path-outside-folder"
    index.write_text("[]")
    assert problem(marian)[0] == "damaged-file"


def test_config_must_exist_and_be_valid(marian: Path) -> None:
    (marian / "config.json").write_text("{")
    code, text = problem(marian)
    assert code == "invalid-json"
    assert text.startswith(f"{marian / 'config.json'}: ")
    (marian / "config.json").write_text("{}")
    assert problem(marian)[0] == "invalid-config"
    (marian / "config.json").unlink()
    assert problem(marian)[0] == "missing-config"


def test_tokenizer_files_must_exist(marian: Path, bert: Path) -> None:
    (marian / "target.spm").unlink()
    code, text = problem(marian)
    assert code == "missing-tokenizer"
    assert "target.spm" in text
    (bert / "tokenizer.json").unlink()
    code, text = problem(bert, "text-classification")
    assert code == "missing-tokenizer"
    assert "tokenizer.json or vocab.txt" in text
    (bert / "vocab.txt").touch()
    assert check_model_folder(bert, "text-classification") == ([], [])


def test_family_must_support_task(marian: Path) -> None:
    code, text = problem(marian, "text-classification")
    assert code == "unsupported-task"
    encoders = [name for name, family in FAMILIES.items() if "text-classification" in family.tasks]
    assert all(value in text for value in ("marian", *encoders))


def test_config_unsupported_by_its_family_is_rejected(bert: Path) -> None:
    rope = {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4}}
    architectures = ["ModernBertForSequenceClassification"]
    config = {"model_type": "modernbert", "architectures": architectures, "rope_parameters": rope}
    (bert / "config.json").write_text(json.dumps(config))
    code, text = problem(bert, "text-classification")
    assert code == "unsupported-config"
    assert all(value in text for value in ("'dynamic'", "(full_attention)"))


def test_encoder_without_classifier_warns(bert: Path) -> None:
    (bert / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    problems, [warning] = check_model_folder(bert, "text-classification")
    assert problems == []
    assert warning.code == "new-classifier"


def test_local_model_folder_distinguishes_paths_from_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert local_model_folder("Helsinki-NLP/opus-mt-en-de", tmp_path) is None
    assert local_model_folder("models/misspelled", tmp_path) == tmp_path / "models/misspelled"
    assert local_model_folder("../x", tmp_path) == tmp_path / "../x"
    assert local_model_folder("plain", tmp_path) == tmp_path / "plain"


def test_fetch_model_checks_local_folders(marian: Path) -> None:
    assert fetch_model("marian", marian.parent, "translation") == marian
    (marian / "model.safetensors").unlink()
    with raises_code("missing-weights", InputError):
        fetch_model("marian", marian.parent, "translation")


def test_fetch_model_downloads_only_safe_files(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    requests: list[str] = []

    def download(model: str, allow_patterns: list[str], **_: Any) -> str:
        if model == "a/gone":
            raise OSError("offline")
        requests.extend([model, *allow_patterns])
        return str(bert)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("smelt.pipeline.inspect.find_model.hub_unreachable_reason", lambda: None)
    assert fetch_model("a/b", bert.parent, "text-classification") == bert
    assert requests[0] == "a/b"
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in requests)
    with raises_code("not-on-hub", InputError) as excinfo:
        fetch_model("a/gone", bert.parent, "text-classification")
    assert all(value in str(excinfo.value) for value in ("a/gone", "offline"))


@pytest.mark.parametrize(("name", "codes"), [
    ("ByT5Tokenizer", []), ("T5Tokenizer", ["missing-tokenizer"]), (None, ["missing-tokenizer"]),
])  # fmt: skip
def test_byt5_needs_no_vocabulary(tmp_path: Path, name: str | None, codes: list[str]) -> None:
    if name:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    assert message_codes(check_tokenizer_files(tmp_path, "t5")) == codes


@pytest.mark.parametrize(("kind", "files", "expected"), [
    ("distilbert", ["vocab.txt"], []), ("distilbert", [], ["tokenizer.json or vocab.txt"]),
    ("roberta", ["tokenizer.json"], []), ("roberta", ["vocab.json", "merges.txt"], []),
    ("roberta", ["vocab.json"], ["tokenizer.json or vocab.json and merges.txt"]),
])  # fmt: skip
def test_classifier_families_require_their_tokenizer_files(
    bert: Path, kind: str, files: list[str], expected: list[str]
) -> None:
    (bert / "config.json").write_text(
        json.dumps({"model_type": kind, "architectures": ["XForSequenceClassification"]})
    )
    (bert / "tokenizer.json").unlink()
    for name in files:
        (bert / name).write_text("{}")
    problems, _ = check_model_folder(bert, "text-classification")
    assert message_codes(problems) == ["missing-tokenizer"] * len(expected)
    assert all(part in problem.message for problem, part in zip(problems, expected, strict=True))


def test_hub_ids_fail_within_seconds_without_network(tmp_path: Path, monkeypatch: Any) -> None:
    from huggingface_hub import constants

    from smelt.core import hub
    from smelt.data.splits import Columns
    from smelt.pipeline.inspect.find_model import fetch_model
    from smelt.pipeline.inspect.model_info import inspect_model
    from smelt.tasks.read_split import read_split

    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: release.wait(20))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(hub, "_cached_results", {})
    monkeypatch.setattr(hub, "CONNECT_TIMEOUT_S", 0.2)
    for ask, code in (
        (lambda: fetch_model("nobody/nothing", tmp_path, "translation"), "not-in-hub-cache"),
        (lambda: inspect_model("nobody/nothing", base=tmp_path), "not-in-hub-cache"),
        (lambda: read_split("nobody/nothing", "translation", Columns(), tmp_path), "missing-data"),
    ):
        with raises_code(code, InputError) as excinfo:
            ask()
        assert all(value in str(excinfo.value) for value in ("nobody/nothing", "hub.invalid"))
    release.set()
