"""Which metrics a third-party graph is scored by."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from smelt import InputError
from smelt.pipeline.plan.load_plan import load_plan
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs

RECIPE = """
model: m.onnx
task: custom
data: {test: test.npz}
stages: []
score: {latency: false}
"""
HEAT_MAP = [helper.make_node("Conv", ["x", "w"], ["map"], pads=[1, 1, 1, 1])]
POOLED = [
    helper.make_node("GlobalAveragePool", ["map"], ["pooled"]),
    helper.make_node("Flatten", ["pooled"], ["y"]),
]
SHAPES: dict[str, list[Any]] = {"map": ["N", 5, 8, 8], "y": ["N", 5]}


def write_recipe(folder: Path, outputs: list[str], more: str = "") -> Path:
    """Write a recipe of a graph: a convolution, whose map or mean over the map is an output."""
    weight = numpy_helper.from_array(np.ones((5, 3, 3, 3), np.float32), "w")
    output_infos = [graphs.value_info(name, SHAPES[name]) for name in outputs]
    nodes = [*HEAT_MAP, *(POOLED if "y" in outputs else [])]
    model = graphs.make_model(nodes, [graphs.value_info("x", ["N", 3, 8, 8])], output_infos, [weight])
    graphs.save_model(model, folder / "m.onnx")
    np.savez(folder / "test.npz", x=np.zeros((8, 3, 8, 8), np.float32))
    (folder / "r.yaml").write_text(RECIPE.replace("latency: false", f"latency: false{more}"))
    return folder / "r.yaml"


@pytest.mark.parametrize(
    ("outputs", "metrics"),
    [
        (["y"], ("top1", "agreement", "relative_error")),
        (["map"], ("agreement", "relative_error")),
        (["map", "y"], ("agreement", "top1", "relative_error")),
    ],
)
def test_top1_is_scored_only_for_graphs_with_class_outputs(
    tmp_path: Path, outputs: list[str], metrics: tuple[str, ...]
) -> None:
    """The verdict judges by the first metric: that of a classifier is its decisions."""
    assert load_plan(write_recipe(tmp_path, outputs)).recipe.score.quality == metrics


def test_listed_metrics_keep_their_order(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, ["y"], ", quality: [agreement, top1]")
    assert load_plan(recipe).recipe.score.quality == ("agreement", "top1")


@pytest.mark.parametrize("more", [", quality: [agreement, top1]", "}\ngates: {top1: {min: 99}"])
def test_top1_of_heat_map_is_rejected(tmp_path: Path, more: str) -> None:
    with raises_code("does-not-fit-model", InputError):
        load_plan(write_recipe(tmp_path, ["map"], more))
