"""Drawn graphs go through the stages: valid files that run and compute the same, or an explanation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import find
from onnxruntime import quantization  # noqa: F401  the processes that are forked have it

from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from tests.support.graphs import random_graphs
from tests.support.processes import staged_graphs

DRAWS = int(os.environ.get("SMELT_GRAPH_DRAWS", "2"))


@pytest.mark.slow
def test_random_graphs_are_converted_correctly_or_rejected_with_reason(tmp_path):
    command = [sys.executable, "-m", staged_graphs.__name__, str(DRAWS), tmp_path / "home"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert f"drawn: {DRAWS}" in done.stderr  # not killed: it reports on all its draws


def crashes(self, src, settings, ctx):
    os.kill(os.getpid(), 11)


def raises(self, src, settings, ctx):
    raise KeyError("w")


def refuses(self, src, settings, ctx):
    from smelt.core.errors import RunError

    raise RunError("nothing that says why")


def negates(self, src, settings, ctx):
    import onnx

    model = onnx.load(src.path / "model.onnx")
    output = model.graph.output[0].name
    [last] = [node for node in model.graph.node if output in node.output]
    last.op_type = "Neg"
    onnx.save(model, ctx.out / "model.onnx")


def forgets(self, src, settings, ctx):
    import onnx

    model = onnx.load(src.path / "model.onnx")
    del model.graph.node[0]
    onnx.save(model, ctx.out / "model.onnx")


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A graph that the stage takes as it should."""
    root_folder, graph = (
        tmp_path_factory.mktemp("drawn"),
        find(random_graphs.random_graphs(["mlp"]), lambda graph: True),
    )
    assert staged_graphs.unsupported_reason(graph, root_folder / "draw") is None
    assert staged_graphs.find_faults(graph, root_folder / "draw", ("dynamic",))[0] == []
    return graph


@pytest.mark.parametrize(
    ("fault", "words"),
    [(crashes, "signal 11"), (raises, "KeyError"), (refuses, "without a code"), (negates, "off"),
     (forgets, "onnx.checker")],
)  # fmt: skip
def test_faults_in_conversion_are_detected(fault, words, graph, tmp_path, monkeypatch):
    monkeypatch.setattr(QuantizeOnnx, "__call__", fault)
    [fault_text] = staged_graphs.find_faults(graph, tmp_path / "draw", ("dynamic",))[0]
    assert fault_text.startswith("dynamic: ")
    assert words in fault_text
