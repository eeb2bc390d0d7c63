"""Engines of graphs of others: shapes go by axis, since every exporter has its own names."""

from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.errors import InputError, RunError
from smelt.core.messages import message_codes
from smelt.data.npz_arrays import SampleArrays
from smelt.data.splits import split_from_arrays
from smelt.export.onnx_models.fp16 import Fp16, Fp16Settings
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from smelt.export.onnx_models.simplify import Simplify, SimplifySettings
from smelt.export.settings import TensorrtSettings
from smelt.export.tensorrt.build_engine import SizeRange
from smelt.export.tensorrt.preflight import check_profile
from smelt.export.tensorrt.profiles import imported_ranges, imported_shapes
from smelt.export.tensorrt.stage import plan_graphs
from smelt.runtimes.onnx_import.graph_files import graph_signature
from smelt.runtimes.onnx_import.signature import write_signature
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs
from tests.support.processes import tensorrt_rig


def image_model() -> Any:
    return graphs.make_model(
        [],
        [graphs.value_info("x", ["unk__1", 3, "h", None]), graphs.value_info("k", [2])],
        [graphs.value_info("x", [])],
    )


def test_dynamic_axes_use_sample_sizes(tmp_path: Path) -> None:
    write_signature(tmp_path, graph_signature(image_model()))
    split = split_from_arrays(
        "r.npz", SampleArrays({"x": np.zeros((5, 3, 32, 48), np.float32), "k": np.zeros(2)}, 5)
    )
    ctx = harness.make_context(tmp_path / "out", "custom", {"calibration": split})
    settings = TensorrtSettings(profiles=[{"max_batch_size": 2}, {"max_batch_size": 16}])  # type: ignore[list-item]
    ranges, limit = imported_ranges(tmp_path, settings, ctx)
    assert limit is None
    assert ranges[1] == {
        "batch": SizeRange(1, 1, 16),
        "x.2": SizeRange(32, 32, 32),
        "x.3": SizeRange(48, 48, 48),
    }
    assert imported_shapes(image_model(), ranges[0], "m.onnx") == {
        "x": ((1, 3, 32, 48), (1, 3, 32, 48), (2, 3, 32, 48))
    }
    with raises_code("no-calibration-data", InputError):
        imported_ranges(tmp_path, settings, harness.make_context(tmp_path / "other", "custom"))


def test_batch_range_is_applied_to_sample_axis(tmp_path: Path) -> None:
    model = graphs.gru_model(["batch", "time", 4], ["layers", "batch", 8], ["layers", "batch", 8])
    write_signature(tmp_path, graph_signature(model))
    # as they are read: the axis of the rows first
    arrays = SampleArrays({"x": np.zeros((5, 6, 4), np.float32), "state": np.zeros((5, 1, 8), np.float32)}, 5)
    ctx = harness.make_context(
        tmp_path / "out", "custom", {"calibration": split_from_arrays("r.npz", arrays)}
    )
    [ranges], _ = imported_ranges(tmp_path, TensorrtSettings(max_batch_size=16), ctx)
    shapes = imported_shapes(model, ranges, "m.onnx")
    assert shapes["x"][2] == (16, 6, 4)
    assert shapes["state"][0] == (1, 1, 8)
    assert shapes["state"][2] == (1, 16, 8)


def test_unnamed_axes_can_have_different_sizes() -> None:
    model = graphs.make_model([], [graphs.value_info("x", ["?", 3, "?"])], [graphs.value_info("x", [])])
    shapes = {"x": ((1, 3, 7), (1, 3, 7), (8, 3, 7))}
    assert check_profile(model, shapes, None) == []
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "n"
    assert len(check_profile(model, shapes, None)) == 1


def test_text_inputs_use_axis_1_as_length() -> None:
    model = graphs.make_model(
        [], [graphs.value_info("input_ids", ["s0", "s1"])], [graphs.value_info("input_ids", [])]
    )
    ranges = {"batch": SizeRange(1, 1, 8), "input": SizeRange(1, 20, 64)}
    assert imported_shapes(model, ranges, "m.onnx") == {"input_ids": ((1, 1), (1, 20), (8, 64))}
    with raises_code("unknown-axis-size", RunError) as excinfo:
        imported_shapes(image_model(), ranges, "m.onnx")
    assert " 2 " in str(excinfo.value)  # the axis


FOR_ENGINES = {
    "simplify": (Simplify(), SimplifySettings(), "FLOAT"),
    "fp16": (Fp16(), Fp16Settings(), "HALF"),
    "int8": (QuantizeOnnx(), QuantizeOnnxSettings(scheme="int8-static", target="tensorrt"), "INT8"),
}


def test_imported_graphs_build_after_each_stage(tmp_path: Path) -> None:
    tensorrt_rig.rig_environment()
    source, data = (
        graphs.make_artifact(tmp_path / "src", graphs.two_layer_classifier(width=64)),
        {"calibration": graphs.make_split()},
    )
    profile_by_graph: dict[Path, Any] = {}
    for name, (stage, settings, _) in FOR_ENGINES.items():
        ctx = harness.run_stage(stage, settings, source, tmp_path / name, data=data)
        ranges, limit = imported_ranges(ctx.out, TensorrtSettings(), ctx)
        profile_by_graph |= plan_graphs(ctx.out, ranges, limit, ctx.warnings, imported_shapes)
        assert ctx.warnings == []
    answers = tensorrt_rig.build_all(profile_by_graph)
    for (name, (_, _, kind)), answer in zip(FOR_ENGINES.items(), answers, strict=True):
        assert answer.get("bytes"), (name, answer)
        assert answer["types"].get(kind, 0) >= 2, (name, answer)
    # an engine of the graph that smelt quantizes for the CPU is refused before TensorRT is asked
    settings = QuantizeOnnxSettings(scheme="int8-static")
    ctx = harness.run_stage(QuantizeOnnx(), settings, source, tmp_path / "cpu", data=data)
    ranges, limit = imported_ranges(ctx.out, TensorrtSettings(), ctx)
    with raises_code("unsupported-graph", RunError) as excinfo:
        plan_graphs(ctx.out, ranges, limit, ctx.warnings, imported_shapes)
    assert {error.file for error in excinfo.value.messages} == {"model.onnx"}
    assert "tensorrt-unsigned-codes" in message_codes(excinfo.value.messages)
