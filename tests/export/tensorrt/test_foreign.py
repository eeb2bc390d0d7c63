"""Engines of graphs of others: shapes go by axis, since every exporter has its own names."""

from pathlib import Path
from typing import Any

import foreign_graphs as graphs
import harness
import numpy as np
import tensorrt_rig
from refusals import refused

from smelt.core.data import split_of
from smelt.core.errors import InputError, RunError
from smelt.core.messages import codes
from smelt.core.rows.arrays import Arrays
from smelt.export.foreign.fp16 import Fp16, Fp16Settings
from smelt.export.foreign.quantize import QuantizeOnnx, QuantizeOnnxSettings
from smelt.export.foreign.simplify import Simplify, SimplifySettings
from smelt.export.tensorrt.foreign import foreign_ranges, foreign_shapes
from smelt.export.tensorrt.preflight import check_profile
from smelt.export.tensorrt.profile import Range
from smelt.export.tensorrt.settings import TensorrtSettings
from smelt.export.tensorrt.stage import plan_graphs
from smelt.runtime.foreign.signature import write_signature
from smelt.runtime.foreign.values import signature_of


def image_model() -> Any:
    return graphs.model_of(
        [], [graphs.value("x", ["unk__1", 3, "h", None]), graphs.value("k", [2])], [graphs.value("x", [])]
    )


def test_axes_of_any_size_get_that_of_the_rows(tmp_path: Path) -> None:
    write_signature(tmp_path, signature_of(image_model()))
    rows = split_of("r.npz", Arrays({"x": np.zeros((5, 3, 32, 48), np.float32), "k": np.zeros(2)}, 5))
    ctx = harness.context(tmp_path / "out", "custom", {"calibration": rows})
    settings = TensorrtSettings(profiles=[{"max_batch_size": 2}, {"max_batch_size": 16}])  # type: ignore[list-item]
    ranges, limit = foreign_ranges(tmp_path, settings, ctx)
    assert limit is None
    assert ranges[1] == {"batch": Range(1, 1, 16), "x.2": Range(32, 32, 32), "x.3": Range(48, 48, 48)}
    assert foreign_shapes(image_model(), ranges[0], "m.onnx") == {
        "x": ((1, 3, 32, 48), (1, 3, 32, 48), (2, 3, 32, 48))
    }
    with refused("no-calibration-data", InputError):
        foreign_ranges(tmp_path, settings, harness.context(tmp_path / "other", "custom"))


def test_the_batch_is_on_the_axis_of_the_rows(tmp_path: Path) -> None:
    made = graphs.recurrent(["batch", "time", 4], ["layers", "batch", 8], ["layers", "batch", 8])
    write_signature(tmp_path, signature_of(made))
    # as they are read: the axis of the rows first
    arrays = Arrays({"x": np.zeros((5, 6, 4), np.float32), "state": np.zeros((5, 1, 8), np.float32)}, 5)
    ctx = harness.context(tmp_path / "out", "custom", {"calibration": split_of("r.npz", arrays)})
    [ranges], _ = foreign_ranges(tmp_path, TensorrtSettings(max_batch_size=16), ctx)
    found = foreign_shapes(made, ranges, "m.onnx")
    assert found["x"][2] == (16, 6, 4)
    assert found["state"][0] == (1, 1, 8)
    assert found["state"][2] == (1, 16, 8)


def test_axes_called_by_a_question_mark_may_have_different_sizes() -> None:
    made = graphs.model_of([], [graphs.value("x", ["?", 3, "?"])], [graphs.value("x", [])])
    shapes = {"x": ((1, 3, 7), (1, 3, 7), (8, 3, 7))}
    assert check_profile(made, shapes, None) == []
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    made.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "n"
    assert len(check_profile(made, shapes, None)) == 1


def test_of_texts_axis_1_is_the_length() -> None:
    model = graphs.model_of([], [graphs.value("input_ids", ["s0", "s1"])], [graphs.value("input_ids", [])])
    ranges = {"batch": Range(1, 1, 8), "input": Range(1, 20, 64)}
    assert foreign_shapes(model, ranges, "m.onnx") == {"input_ids": ((1, 1), (1, 20), (8, 64))}
    with refused("unknown-axis-size", RunError) as caught:
        foreign_shapes(image_model(), ranges, "m.onnx")
    assert " 2 " in str(caught.value)  # the axis


FOR_ENGINES = {
    "simplify": (Simplify(), SimplifySettings(), "FLOAT"),
    "fp16": (Fp16(), Fp16Settings(), "HALF"),
    "int8": (QuantizeOnnx(), QuantizeOnnxSettings(scheme="int8-static", target="tensorrt"), "INT8"),
}


def test_engines_are_built_of_what_the_stages_make_of_a_graph_of_somebody_else(tmp_path: Path) -> None:
    tensorrt_rig.require()
    source, data = (
        graphs.artifact(tmp_path / "src", graphs.two_layers(width=64)),
        {"calibration": graphs.split()},
    )
    planned: dict[Path, Any] = {}
    for name, (stage, settings, _) in FOR_ENGINES.items():
        ctx = harness.run(stage, settings, source, tmp_path / name, data=data)
        ranges, limit = foreign_ranges(ctx.out, TensorrtSettings(), ctx)
        planned |= plan_graphs(ctx.out, ranges, limit, ctx.warnings, foreign_shapes)
        assert ctx.warnings == []
    answers = tensorrt_rig.build_all(planned)
    for (name, (_, _, kind)), answer in zip(FOR_ENGINES.items(), answers, strict=True):
        assert answer.get("bytes"), (name, answer)
        assert answer["types"].get(kind, 0) >= 2, (name, answer)
    # an engine of the graph that smelt quantizes for the CPU is refused before TensorRT is asked
    settings = QuantizeOnnxSettings(scheme="int8-static")
    ctx = harness.run(QuantizeOnnx(), settings, source, tmp_path / "cpu", data=data)
    ranges, limit = foreign_ranges(ctx.out, TensorrtSettings(), ctx)
    with refused("unsupported-graph", RunError) as caught:
        plan_graphs(ctx.out, ranges, limit, ctx.warnings, foreign_shapes)
    assert {one.file for one in caught.value.found} == {"model.onnx"}
    assert "tensorrt-unsigned-codes" in codes(caught.value.found)
