"""A package of one file is opened by ONNX Runtime alone, and says what smelt says."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import smelt
from smelt.core.artifact import Artifact, read_artifact
from smelt.core.errors import InputError
from smelt.export.package import one_file_format, text_graph
from smelt.export.package.one_file_format import OneFileFormat
from smelt.export.package.package_format import PackageOrigin, UsageNotes
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny
from tests.support.pairs import matrix
from tests.support.shared_folders import make_once

# ten thousand take seconds
FEW = 300
PROMPTS = ["she sings", "the old house stands near", "a"]


def written(artifact: Artifact, folder: Path, monkeypatch: Any, **generation: Any) -> UsageNotes:
    monkeypatch.setattr(text_graph, "COMPARED_TEXTS", FEW)
    folder.mkdir(exist_ok=True)
    OneFileFormat().check(artifact)
    return OneFileFormat().write(artifact, PackageOrigin(generation=generation), folder)


def answers(folder: Path, texts: list[str], output: str) -> list[Any]:
    session = text_graph.open_extensions_session(str(folder / "model_text.onnx"))
    return session.run([output], {"texts": np.array(texts, dtype=object)})[0].tolist()


@pytest.fixture(autouse=True)
def _extensions(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name:
        pytest.importorskip("onnxruntime_extensions", reason="pip install onnxruntime-extensions")


@pytest.mark.parametrize("beams", [1, 3] if matrix.is_full_matrix() else [3])
def test_translator_string_graph_equals_smelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beams: int
) -> None:
    source = exported_artifacts.exported_artifact("translator")
    written(read_artifact(source), tmp_path / "p", monkeypatch, num_beams=beams, max_new_tokens=7)
    with smelt.load(source) as model:
        expected = model.generate(tiny.SENTENCES, num_beams=beams, max_new_tokens=7)
    assert len(set(expected)) > 3
    assert answers(tmp_path / "p", tiny.SENTENCES, "generated") == expected


def test_model_prefix_is_in_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = read_artifact(exported_artifacts.exported_artifact("translator"))
    shutil.copytree(source.path, tmp_path / "a")
    (tmp_path / "a" / "text.json").write_text(json.dumps({"prefix": "ein lied "}))
    written(dataclasses.replace(source, path=tmp_path / "a"), tmp_path / "p", monkeypatch, max_new_tokens=7)
    with smelt.load(exported_artifacts.exported_artifact("translator")) as model:
        expected = model.generate([f"ein lied {text}" for text in PROMPTS], max_new_tokens=7)
        assert expected != model.generate(PROMPTS, max_new_tokens=7)
    assert answers(tmp_path / "p", PROMPTS, "generated") == expected


@pytest.mark.parametrize("kind", ["gpt2", "int8-caches"])
@pytest.mark.parametrize("generation", [{"max_new_tokens": 5}, {}] if matrix.is_full_matrix() else [{}])
def test_language_model_generates_for_prompts_of_different_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: dict[str, int], kind: str
) -> None:
    source = exported_artifacts.exported_artifact(kind)
    written(read_artifact(source), tmp_path / "p", monkeypatch, **generation)
    texts = PROMPTS if generation else ["she sings"]  # of others in the batch hangs how many tokens follow
    with smelt.load(source) as model:
        expected = model.generate(texts, **generation)
    assert all(len(b) > len(a) for a, b in zip(texts, expected, strict=True))
    generated = answers(tmp_path / "p", texts, "generated")
    assert [re.sub("\ufffd+", "\ufffd", text) for text in generated] == [
        re.sub("\ufffd+", "\ufffd", text) for text in expected
    ]


def test_unsupported_tokenizer_gives_numeric_graph_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a word whose beginning alone is known BERT's tokenizer knows nothing, the operator the beginning."""
    source = exported_artifacts.exported_artifact("classifier")
    usage_notes = written(read_artifact(source), tmp_path / "p", monkeypatch)
    assert any("onnxruntime-extensions" in note for note in usage_notes.notes)
    assert not (tmp_path / "p" / "model_text.onnx").exists()
    with smelt.load(source) as model:
        encoded = model._runner.text.tokenizer.encode_batch(tiny.SENTENCES[:1], 32).ids[0]
        expected = model.predict(tiny.SENTENCES[:1])[0].probabilities
    output = program(tmp_path / "p", *map(str, encoded))
    logits = np.array(output.split(), dtype=np.float64)
    odds = np.exp(logits - logits.max())
    assert odds / odds.sum() == pytest.approx(list(expected.values()), abs=1e-4)


def program(folder: Path, *arguments: str | bytes, code: int = 0) -> str:
    """Run answer.py of `folder` from elsewhere; return what it says."""
    command = [sys.executable, folder / "answer.py", *arguments]
    done = subprocess.run(command, cwd=folder.parent, check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_example_program_equals_smelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = exported_artifacts.exported_artifact("translator")
    usage_notes = written(read_artifact(source), tmp_path / "p", monkeypatch, max_new_tokens=7)
    assert usage_notes.run == 'python answer.py "TEXT"'
    with smelt.load(source) as model:
        expected = model.generate(PROMPTS, max_new_tokens=7)
    assert program(tmp_path / "p", *PROMPTS).splitlines() == expected
    assert "invalid" in program(tmp_path / "p", b"a \xff man", code=2)


def test_missing_extensions_give_numeric_graph_and_install_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_extensions", None)
    usage_notes = written(
        read_artifact(exported_artifacts.exported_artifact("translator")), tmp_path / "p", monkeypatch
    )
    assert any("pip install 'smelt[strings]'" in note for note in usage_notes.notes)
    assert usage_notes.run == "python answer.py 5 6 7"
    output = program(tmp_path / "p", "5", "6", "7")
    assert len(output.split()) > 1
    assert "arguments are required: token" in program(tmp_path / "p", code=2)
    assert "invalid int value: 'two'" in program(tmp_path / "p", "two", code=2)
    model_folder = tmp_path / "alone"
    model_folder.mkdir()
    shutil.copy(tmp_path / "p" / "model.onnx", model_folder)
    session = onnxruntime.InferenceSession(str(model_folder / "model.onnx"))
    ids = np.array([[5, 6, 7]])
    sequences = session.run(["sequences"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
    assert sequences.shape[1] > 1


def test_graph_above_protobuf_limit_is_rejected_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_file_format, "MAX_GRAPH_BYTES", 1000)
    with raises_code("graph-too-large", InputError) as excinfo:
        OneFileFormat().check(read_artifact(exported_artifacts.exported_artifact("translator")))
    assert excinfo.value.file == "generate.onnx"


def test_sampling_is_rejected_without_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_code("unsupported-generation-setting", InputError):
        written(
            read_artifact(exported_artifacts.exported_artifact("gpt2")),
            tmp_path / "p",
            monkeypatch,
            do_sample=True,
        )
    assert not list((tmp_path / "p").iterdir())


@pytest.mark.peers
def test_node_outputs_equal_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    node_folder = make_once("onnxruntime-node", lambda folder: folder.mkdir())
    install = [npm, "install", "--prefix", str(node_folder), "--ignore-scripts", "onnxruntime-node"]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        pytest.skip(f"onnxruntime-node cannot be installed: {done.stderr[-200:]}")
    source = exported_artifacts.exported_artifact("translator")
    written(read_artifact(source), tmp_path / "p", monkeypatch, max_new_tokens=7)
    (tmp_path / "p" / "node_modules").symlink_to(node_folder / "node_modules")
    program = [node, tmp_path / "p" / "answer.mjs"]
    ran = subprocess.run(
        [*program, "5", "6", "7", "0"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    for wrong in ([], ["two"]):
        completed = subprocess.run([*program, *wrong], capture_output=True, text=True, check=False)
        assert (completed.returncode, completed.stderr[:27]) == (2, "usage: node answer.mjs TOKE")
    session = onnxruntime.InferenceSession(str(tmp_path / "p" / "model.onnx"))
    ids = np.array([[5, 6, 7, 0]])
    expected = session.run(["sequences"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0]
    assert ran.stdout.split() == [str(token) for token in expected]
