"""Operations of the steps of a run: in its report, its tables and its gates."""

import csv
import json
from statistics import mean

import pytest
from transformers import AutoTokenizer

from smelt.models.checkpoint import load_model
from smelt.models.operations import count_operations
from tests.support import harness
from tests.support.models import every_family, tiny

RECIPE = """
model: m
task: translation
data: {test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}
  - quantize: {scheme: int8-dynamic}
  - onnx: {target: ort-cpu}
score: {quality: [chrf], generation: {max_new_tokens: 2}, latency: false}
gates:
  operations: {max: 1, at: [prune]}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    tiny.write_marian(folder / "m")
    tiny.write_pairs(folder / "data.jsonl", 3)
    (folder / "recipe.yaml").write_text(RECIPE)
    result = harness.smelt(
        "run", folder / "recipe.yaml", "--quiet", "--out", folder / "run", "--store", folder / "s", code=3
    )
    return folder, result.output


def _steps(folder):
    report = json.loads((folder / "run" / "report.json").read_text())
    return {step["name"]: step for step in report["steps"]}


def test_steps_have_operations_of_float_model_at_mean_length(run):
    folder, steps = run[0], _steps(run[0])
    tokenizer = AutoTokenizer.from_pretrained(folder / "m")
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    sources = [len(tokenizer(row["source"])["input_ids"]) for row in rows]
    targets = [len(tokenizer(text_target=row["target"])["input_ids"]) for row in rows]
    size = (round(mean(sources)), round(mean(targets)))
    expected = {
        name: count_operations(load_model(path)[0], size)
        for name, path in (("model", folder / "m"), ("prune", folder / "run/artifacts/prune"))
    }
    assert {name: steps[name]["operations"] for name in expected} == expected
    assert expected["prune"] < expected["model"]
    assert steps["quantize"]["operations"] == steps["onnx"]["operations"] == expected["prune"]


def test_model_is_not_changed_by_counting():
    """M2M100 extends its table of positions in a forward pass that is longer than it."""
    model, _ = load_model(every_family.model_with_layers("m2m_100", 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    tables = [module.weights for module in model.modules() if hasattr(module, "weights")]
    assert tables
    assert count_operations(model, (500, 7)) > count_operations(model, (5, 7))
    after = model.state_dict(keep_vars=True)
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    assert [module.weights for module in model.modules() if hasattr(module, "weights")] == tables


def test_gate_on_operations_fails_above_maximum(run):
    step = _steps(run[0])["prune"]
    (gate,) = step["gates"]
    assert (gate["value"], gate["passed"]) == (step["operations"], False)


def test_tables_show_operations_in_millions(run):
    folder, output = run
    value = f"{_steps(folder)['prune']['operations'] / 1e6:.2f}"
    assert value in output
    for name in ("report.md", "report.html"):
        text = (folder / "run" / name).read_text()
        assert "Multiply-adds" in text
        assert value in text
    table = harness.smelt("report", folder / "run", "--format", "csv").output
    rows = {row["step"]: row for row in csv.DictReader(table.splitlines())}
    assert int(rows["onnx"]["operations"]) == _steps(folder)["onnx"]["operations"]


def test_second_run_reads_operations_from_store(run, monkeypatch):
    folder = run[0]
    monkeypatch.setattr("smelt.models.operations.count_model_operations", None)  # calling it would fail
    before = _steps(folder)
    harness.smelt(
        "run", folder / "recipe.yaml", "--quiet", "--out", folder / "run", "--store", folder / "s", code=3
    )
    assert {n: s["operations"] for n, s in _steps(folder).items()} == {
        n: s["operations"] for n, s in before.items()
    }
