"""Recipes with every form of quantized weights that TensorRT runs, built where no engine can be run."""

import json
from types import SimpleNamespace

import pytest

from smelt.core.artifact import read_artifact
from smelt.pipeline.inspect.machine import has_cuda
from tests.support.models import causal, tiny
from tests.support.pairs.matrix import is_full_matrix
from tests.support.processes import tensorrt_rig
from tests.support.processes.fork_server import ForkServer

pytestmark = pytest.mark.skipif(has_cuda(), reason="here engines can be run")

# settings of quantize, the dtype of the graphs, and a precision that the network has by them
FORMS = {
    "int8": ("{scheme: int8-static, activations_symmetric: true}", "fp16", "int8"),
    "int4": ("{scheme: int4, group_size: 64, symmetric: positive, accuracy_level: 0}", "fp16", "int4"),
    "fp8": ("{scheme: fp8}", "bf16", "fp8"),
    "nvfp4": ("{scheme: nvfp4}", "fp16", "fp4"),
    "weights": ("{scheme: nvfp4, activation_bits: 16, method: gptq}", "bf16", "fp4"),
}
STEPS = """
  - quantize: {settings}
    from: model
    name: {name}
  - onnx: {{target: tensorrt, dtype: {dtype}}}
    name: {name}-graphs
  - tensorrt: {{optimization_level: 0, max_batch_size: 2, timing_cache: false}}
    name: {name}-engine
    optional: true"""
MODELS = {
    "bert": (tiny.write_bert, tiny.write_labeled, "text-classification", "accuracy"),
    "marian": (tiny.write_marian, tiny.write_pairs, "translation", "chrf"),
    "llama": (
        lambda folder: causal.write_model(folder, "llama"), causal.write_lines, "language-modeling",
        "perplexity",
    ),
}  # fmt: skip


# without SMELT_MATRIX=all each form once, and both forms of nvfp4 in a model that generates
FEW = {"bert": ["int8", "int4", "fp8"], "marian": ["nvfp4"], "llama": ["weights"]}


def write_recipe(folder, family, names):
    write_model, write_data, task, metric = MODELS[family]
    write_model(folder / "m")
    file = "data.txt" if task == "language-modeling" else "data.jsonl"
    write_data(folder / file)
    forms = [(name, *FORMS[name][:2]) for name in names]
    steps = "".join(STEPS.format(name=n, settings=settings, dtype=dtype) for n, settings, dtype in forms)
    data = f"data: {{train: {file}, test: {file}}}"
    score = f"score: {{quality: [{metric}], latency: false}}"
    (folder / "recipe.yaml").write_text(f"model: m\ntask: {task}\n{data}\nstages:{steps}\n{score}\n")
    return folder / "recipe.yaml"


@pytest.mark.parametrize("family", MODELS)
def test_recipe_builds_engines_of_all_precisions(family, tmp_path):
    names = list(FORMS) if is_full_matrix() else FEW[family]
    recipe = write_recipe(tmp_path, family, names)
    with ForkServer(tensorrt_rig.rig_environment()) as server:
        arguments = ("run", recipe, "--out", tmp_path / "r", "--store", tmp_path / "s")
        server.start(*arguments, output=tmp_path / "output.txt")
        done = SimpleNamespace(returncode=server.wait(), stdout=(tmp_path / "output.txt").read_text())
    assert done.returncode == 0, done.stdout
    steps = {s["name"]: s for s in json.loads((tmp_path / "r" / "report.json").read_text())["steps"]}
    graphs = {"marian": ["encoder_model", "decoder_with_past_model"]}.get(family, ["model"])
    for name in names:
        _, dtype, precision = FORMS[name]
        step = steps[f"{name}-engine"]
        assert step["cause"] == "cannot-run-here", (name, step["error"])
        engines = read_artifact(tmp_path / "r" / "artifacts" / f"{name}-engine").manifest.details["engines"]
        assert sorted(engines) == sorted(graphs)
        for engine in engines.values():
            precisions = engine["network"]["precisions"]
            assert precisions[precision] > 2
            assert precisions[dtype] > precisions.get("fp32", 0)
