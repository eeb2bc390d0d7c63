"""Recipes that start from graphs which generate: what smelt packages for Optimum, it reads back."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import smelt
from smelt.core.artifact import read_artifact
from smelt.core.messages import message_codes
from smelt.export.package.optimum import OptimumFormat
from smelt.export.package.package_format import PackageOrigin
from smelt.export.package.write_package import write_package
from tests.support import harness, shared_folders
from tests.support.expected_errors import command_error
from tests.support.graphs import exported_artifacts
from tests.support.models import causal, embedders, tiny

TEXTS = tiny.SENTENCES[:4]
RECIPE = """
model: MODEL
task: TASK
data: {test: DATA, calibration: DATA}
stages: STAGES
score: {latency: false, generation: {max_new_tokens: 6}}
"""


def write(here: Path, kind: str, task: str, stages: str = "[]") -> Path:
    """Put the package of a model and rows into `here`; return a recipe that starts from it."""

    def make(home: Path) -> None:
        write_package(
            OptimumFormat(),
            read_artifact(exported_artifacts.exported_artifact(kind)),
            PackageOrigin(generation={}),
            home,
        )

    shutil.copytree(shared_folders.make_once(f"taken-{kind}", make), here / "p")
    data = (
        causal.write_lines(here / "d.txt", 1)
        if task == "language-modeling"
        else tiny.write_pairs(here / "d.jsonl", 6)
    )
    text = RECIPE.replace("MODEL", "p").replace("TASK", task).replace("STAGES", stages)
    (here / "r.yaml").write_text(text.replace("DATA", data.name))
    return here / "r.yaml"


def generated(folder: Path | str) -> list[str]:
    with smelt.load(folder) as model:
        return list(model.generate(list(TEXTS), max_new_tokens=6))


def test_imported_generator_equals_artifact_and_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, task = "translator", "translation"
    monkeypatch.chdir(tmp_path)
    recipe = write(tmp_path, kind, task, "[simplify, quantize, {fp16: {}, from: simplify}]")
    harness.smelt("run", recipe, code=0)
    steps = {s["name"]: s for s in json.loads((tmp_path / "runs/r/report.json").read_text())["steps"]}
    assert [name for name, step in steps.items() if step["status"] != "done"] == []
    assert steps["model"]["quality"] == steps["simplify"]["quality"]
    graphs = [onnx.load(path) for path in (tmp_path / "runs/r/artifacts/model").glob("*.onnx")]
    weights = sum(np.prod(t.dims) for g in graphs for t in g.graph.initializer if t.data_type == 1)
    assert weights <= steps["model"]["parameters"] < 1.05 * weights
    assert all("chrf" in step["quality"] for step in steps.values())
    assert steps["quantize"]["size_bytes"] < 0.6 * steps["simplify"]["size_bytes"]
    expected = generated(exported_artifacts.exported_artifact(kind))
    assert generated("runs/r/artifacts/model") == generated("runs/r/artifacts/simplify") == expected
    assert len(generated("runs/r/artifacts/quantize")) == len(TEXTS)
    harness.smelt("package", "runs/r/artifacts/model", "--format", "optimum", "--out", "again", code=0)
    error = command_error(harness.smelt("package", "runs/r/artifacts/model", "--out", "alone", code=2))
    assert error.code == "missing-graph"


@pytest.mark.parametrize(("remove", "task", "code", "named"), [
    (("decoder_with_past_model.onnx", "decoder_model_merged.onnx"), "translation", "incomplete-generator",
     "decoder_with_past_model"),
    (("encoder_model.onnx",), "translation", "incomplete-generator", ""),
    (("config.json",), "translation", "missing-config", ""),
    (("vocab.json",), "translation", "missing-tokenizer", "vocab.json"),
    ((), "language-modeling", "unsupported-task", "marian"),
    ((), "text-classification", "generator-graphs", ""),
])  # fmt: skip
def test_missing_generator_files_are_rejected_by_plan(
    remove: tuple[str, ...], task: str, code: str, named: str, tmp_path: Path
) -> None:
    recipe = write(tmp_path, "translator", "translation")
    for name in remove:
        (tmp_path / "p" / name).unlink()
    recipe.write_text(recipe.read_text().replace("task: translation", f"task: {task}"))
    error = command_error(harness.smelt("plan", recipe, code=2))
    messages = [message for message in error.messages if message.code == code]
    assert len(messages) == 1, str(error)
    assert named in messages[0].message


def test_single_graph_of_generator_is_rejected(tmp_path: Path) -> None:
    recipe = write(tmp_path, "translator", "translation")
    recipe.write_text(recipe.read_text().replace("model: p", "model: p/encoder_model.onnx"))
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert "part-of-generator" in message_codes(error.messages)
    assert f"model: {tmp_path / 'p'}." in str(error)


def test_tensorrt_is_rejected_for_imported_generator(tmp_path: Path) -> None:
    recipe = write(tmp_path, "translator", "translation", "[simplify, tensorrt]")
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert [(message.code, message.setting) for message in error.messages] == [
        ("unsupported-graph", "stages[1].tensorrt")
    ]


def test_hidden_states_are_pooled_as_recipe_specifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimum's feature extraction gives no vectors; smelt's package for it gives both."""
    monkeypatch.chdir(tmp_path)
    source = exported_artifacts.exported_artifact("embedder")
    write_package(OptimumFormat(), read_artifact(source), PackageOrigin(generation={}), tmp_path / "p")
    model = onnx.load(tmp_path / "p/model.onnx")
    del model.graph.output[0]
    assert [output.name for output in model.graph.output] == ["last_hidden_state"]
    onnx.save(model, tmp_path / "p/model.onnx")
    shutil.rmtree(tmp_path / "p/1_Pooling")
    (tmp_path / "p/modules.json").unlink()
    data = embedders.write_rows(tmp_path / "d.jsonl", 6)
    text = RECIPE.replace("MODEL", "p").replace("TASK", embedders.TASK).replace("STAGES", "[]")
    text = text.replace("DATA", data.name).replace(", generation: {max_new_tokens: 6}", "")
    (tmp_path / "r.yaml").write_text(text)
    error = command_error(harness.smelt("plan", tmp_path / "r.yaml", code=2))
    assert error.code == "missing-pooling"
    assert "embedding: {pooling: mean | cls | max}" in str(error)
    (tmp_path / "r.yaml").write_text(f"{text}embedding: {{pooling: mean, normalize: true}}\n")
    harness.smelt("run", tmp_path / "r.yaml", code=0)
    with smelt.load("runs/r/artifacts/model") as imported_model, smelt.load(source) as other:
        np.testing.assert_allclose(imported_model.embed(TEXTS), other.embed(TEXTS), atol=1e-5)
