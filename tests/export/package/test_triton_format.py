"""A model repository for Triton: what its model in Python answers, with a stand-in for Triton."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smelt
from smelt.core.artifact import Artifact, Manifest, read_artifact
from smelt.core.errors import InputError
from smelt.export.package.package_format import PackageOrigin
from smelt.export.package.triton_format import TritonFormat
from smelt.runtimes.tensorrt_engine import EngineSidecar, write_sidecar
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny
from tests.support.standins.triton_stand_in import ask_text_model, parse_model_config

PROMPTS = ["she sings", "the old house stands", "a"]


def written(kind: str, folder: Path, **generation: Any) -> Path:
    folder.mkdir()
    artifact = read_artifact(exported_artifacts.exported_artifact(kind))
    TritonFormat().check(artifact)
    TritonFormat().write(artifact, PackageOrigin(generation=generation), folder)
    return folder / "model_repository"


def lines(responses: list[Any]) -> list[Any]:
    arrays = [tensor.as_numpy() for response in responses for tensor in response.tensors]
    assert all(tensor.name == "ANSWER" for response in responses for tensor in response.tensors)
    return [row for array in arrays for row in array]


@pytest.mark.parametrize(("kind", "texts", "generation"), [
    ("translator", tiny.SENTENCES, {"max_new_tokens": 7}),
    ("translator", tiny.SENTENCES, {"max_new_tokens": 7, "num_beams": 3}),
    ("t5", tiny.SENTENCES, {"max_new_tokens": 7}), ("gpt2", PROMPTS, {"max_new_tokens": 6}),
    ("writer", PROMPTS, {"max_new_tokens": 6}), ("int8-caches", PROMPTS, {"max_new_tokens": 6}),
])  # fmt: skip
def test_texts_equal_smelt_and_requests_share_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, texts: list[str], generation: dict[str, int]
) -> None:
    responses, triton = ask_text_model(written(kind, tmp_path / "p", **generation), texts, monkeypatch)
    assert triton.batches == [len(texts)]
    with smelt.load(exported_artifacts.exported_artifact(kind)) as model:
        expected = model.generate(texts, **generation)
    assert [row[0].decode() for row in lines(responses)] == expected


def test_model_prefix_is_added_to_each_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = read_artifact(exported_artifacts.exported_artifact("translator"))
    shutil.copytree(source.path, tmp_path / "a")
    (tmp_path / "a" / "text.json").write_text(json.dumps({"prefix": "ein lied "}))
    (tmp_path / "p").mkdir()
    artifact = Artifact(tmp_path / "a", source.manifest)
    TritonFormat().write(artifact, PackageOrigin(generation={"max_new_tokens": 7}), tmp_path / "p")
    responses, _ = ask_text_model(tmp_path / "p" / "model_repository", PROMPTS, monkeypatch)
    with smelt.load(exported_artifacts.exported_artifact("translator")) as model:
        expected = model.generate([f"ein lied {text}" for text in PROMPTS], max_new_tokens=7)
        assert expected != model.generate(PROMPTS, max_new_tokens=7)
    assert [row[0].decode() for row in lines(responses)] == expected


def test_classifier_returns_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = written("classifier", tmp_path / "p")
    logits = np.array(lines(ask_text_model(repository, tiny.SENTENCES, monkeypatch)[0]))
    with smelt.load(exported_artifacts.exported_artifact("classifier")) as model:
        expected = [list(prediction.probabilities.values()) for prediction in model.predict(tiny.SENTENCES)]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(odds / odds.sum(axis=1, keepdims=True), expected, atol=1e-4)
    assert list(parse_model_config((repository / "text" / "config.pbtxt").read_text()).output[0].dims) == [2]


def test_graph_error_is_returned_to_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    responses, _ = ask_text_model(
        written("translator", tmp_path / "p"), ["a", "b", "c"], monkeypatch, "out of memory"
    )
    assert [response.error().message() for response in responses] == ["out of memory"] * 2


def classifier_engine(folder: Path, **details: Any) -> Artifact:
    source = read_artifact(exported_artifacts.exported_artifact("classifier"))
    folder.mkdir()
    for name in source.manifest.files:
        if not name.endswith(".onnx"):
            (folder / name).write_bytes((source.path / name).read_bytes())
    (folder / "model.plan").write_bytes(b"engine")
    details = {"target": "tensorrt", "profile": {"batch": [1, 4, 24]}, **details}
    manifest: Manifest = source.manifest.model_copy(update={"format": "tensorrt", "details": details})
    return Artifact(folder, manifest)


def graph_config(engine: Artifact, folder: Path) -> Any:
    TritonFormat().check(engine)
    folder.mkdir()
    TritonFormat().write(engine, PackageOrigin(), folder)
    return parse_model_config((folder / "model_repository/graph/config.pbtxt").read_text())


def test_classifier_engine_uses_tensorrt_backend(tmp_path: Path) -> None:
    """The bytes of the engine are copied; nothing here could read them."""
    config = graph_config(classifier_engine(tmp_path / "a"), tmp_path / "p")
    assert (config.backend, config.max_batch_size, config.instance_group[0].kind) == ("tensorrt", 24, 1)
    assert [config_input.name for config_input in config.input] == [
        "input_ids",
        "attention_mask",
        "token_type_ids",
    ]
    assert (tmp_path / "p/model_repository/graph/1/model.plan").read_bytes() == b"engine"
    assert not config.instance_group[0].profile


def test_largest_profile_is_served(tmp_path: Path) -> None:
    """Triton uses the first by default, which does not support max_batch_size."""
    profiles = [{"batch": [1, 1, 1]}, {"batch": [1, 4, 24]}, {"batch": [1, 2, 8]}]
    config = graph_config(classifier_engine(tmp_path / "a", profiles=profiles), tmp_path / "p")
    assert (config.max_batch_size, list(config.instance_group[0].profile)) == (24, ["1"])


@pytest.mark.parametrize(
    ("weights", "allowed"), [("embedded", True), ("refittable", True), ("stripped", False)]
)
def test_engine_without_weights_is_rejected(tmp_path: Path, weights: str, allowed: bool) -> None:
    engine = classifier_engine(tmp_path / "a")
    plan = engine.path / "model.plan"
    sidecar = EngineSidecar("tensorrt", "11.4", None, "model.onnx", "0", 6, weights, False, "none", {}, [])
    write_sidecar(plan, sidecar)
    with nullcontext() if allowed else raises_code("stripped-engine", InputError):
        TritonFormat().check(engine)


STAND_IN = """
class InferInput:
    def __init__(self, name, shape, kind):
        assert (name, kind) == ("TEXT", "BYTES")
    def set_data_from_numpy(self, values):
        self.values = values
class InferenceServerClient:
    def __init__(self, server):
        self.server = server
    def infer(self, model, inputs):
        if self.server == "nowhere":
            raise ConnectionRefusedError(111, "Connection refused")
        self.values = inputs[0].values
        return self
    def as_numpy(self, name):
        return self.values
"""


def test_client_sends_texts_and_reports_missing_server(tmp_path: Path) -> None:
    written("translator", tmp_path / "p")
    (tmp_path / "tritonclient").mkdir()
    (tmp_path / "tritonclient" / "http.py").write_text(STAND_IN)
    (tmp_path / "tritonclient" / "utils.py").write_text("class InferenceServerException(Exception): ...")

    def client(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, tmp_path / "p" / "client.py", *words], capture_output=True, encoding="utf-8",
            check=False, env=dict(os.environ) | {"PYTHONPATH": str(tmp_path), "PYTHONUTF8": "1"},
        )  # fmt: skip
        return done.returncode, done.stdout or done.stderr.splitlines()[-1]

    assert client("s\u00fc\u00df", "two dogs") == (0, "s\u00fc\u00df\ntwo dogs\n")
    assert client("a", "--server", "nowhere") == (1, "client.py: nowhere: [Errno 111] Connection refused")
    assert client() == (2, "client.py: error: the following arguments are required: text")


def test_generative_engines_are_rejected() -> None:
    source = read_artifact(exported_artifacts.exported_artifact("translator"))
    manifest = source.manifest.model_copy(update={"format": "tensorrt"})
    with raises_code("unsupported-task", InputError):
        TritonFormat().check(Artifact(source.path, manifest))
