"""Engines of graphs with ONNX's attention, norms, rotary embedding and caches, through recipes on the rig.

TensorRT for RTX, which the rig builds with, has no fused attention in float32: engines are built there too,
since the builder may use several kernels then.
"""

import json
import os
from types import SimpleNamespace

import pytest

from tests.support.graphs import graph_exports
from tests.support.models import tiny
from tests.support.processes import tensorrt_rig
from tests.support.processes.fork_server import ForkServer

RECIPE = """
model: {model}
task: {task}
data: {{validation: data.jsonl, test: data.jsonl}}
stages:
  - onnx: {{target: tensorrt, dtype: {dtype}, {settings}}}
    name: graphs
  - tensorrt: {{optimization_level: 0, max_batch_size: 2, timing_cache: false, max_new_tokens: 8}}
    name: engine
score: {{quality: [{metric}], latency: false}}
"""
# (family, dtype, settings) -> attentions and caches of each engine
BUILT = {
    ("llama", "fp16", "cache_length: 64"): {"model": (1, 2)},
    ("llama", "fp32", "opset: 24"): {"model": (1, 0)},
    ("marian", "fp16", "opset: 24"): {"encoder_model": (2, 0), "decoder_with_past_model": (4, 0)},
    ("bert", "fp32", "opset: 24"): {"model": (2, 0)},
}
OPERATORS = {"llama": {"RMSNormalization": 3, "RotaryEmbedding": 2, "Attention": 1}, "bert": {"Attention": 2}}
METRICS = {"language-modeling": "perplexity", "translation": "bleu", "text-classification": "accuracy"}


@pytest.fixture(scope="module")
def smelt(tmp_path_factory):
    """A function that runs `smelt ARGUMENTS` in the rig: exit code and output of a process of its own."""
    output = tmp_path_factory.mktemp("smelt") / "output.txt"
    with ForkServer(tensorrt_rig.rig_environment()) as server:

        def run(*arguments):
            server.start(*arguments, output=output)
            return SimpleNamespace(returncode=server.wait(), stdout=output.read_text())

        yield run


@pytest.mark.parametrize(("family", "dtype", "settings"), BUILT)
def test_recipe_builds_engines_with_operators_of_attention_and_caches(
    family, dtype, settings, smelt, tmp_path
):
    write, task = graph_exports.FAMILIES[family]
    write(tmp_path / "model")
    if task == "text-classification":
        tiny.write_labeled(tmp_path / "data.jsonl", 8)
    else:
        rows = [{"source": text, "target": text, "text": text} for text in tiny.SENTENCES * 4]
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = RECIPE.format(model="model", task=task, dtype=dtype, settings=settings, metric=METRICS[task])
    (tmp_path / "recipe.yaml").write_text(recipe)
    result = smelt("run", tmp_path / "recipe.yaml", "--out", tmp_path / "r", "--store", tmp_path / "s")
    report_path = tmp_path / "r" / "report.json"
    assert report_path.is_file(), result.stdout
    steps = {step["name"]: step for step in json.loads(report_path.read_text())["steps"]}
    engine, graphs = steps["engine"], steps["graphs"]
    assert (engine["status"], engine["error"]) == ("done", None), result.stdout
    networks = {name: built["network"] for name, built in engine["details"]["engines"].items()}
    counts = {name: (n["fused_attention"], n["cache_updates"]) for name, n in networks.items()}
    assert counts == BUILT[family, dtype, settings]
    assert "tensorrt-profile-conflict" not in {warning["code"] for warning in engine["warnings"]}
    operators = next(iter(graphs["details"]["graphs"].values()))["operators"]
    assert {name: operators[name] for name in OPERATORS.get(family, {})} == OPERATORS.get(family, {})
    assert not {"Softmax", "Pow", "Sin"} & operators.keys()
    assert graphs["details"]["opset"] == 24
    assert os.path.getsize(tmp_path / "r" / "artifacts" / "engine" / f"{next(iter(networks))}.plan") > 10_000
