"""A simplified graph is kept where it computes the same, in a process that may fail."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from smelt.core.errors import InputError
from smelt.core.messages import Message, message_codes, warning
from smelt.core.system import IsolatedProcessError
from smelt.export.onnx_models import simplify
from smelt.export.onnx_models.simplify import Simplify, SimplifySettings
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs


def nodes_of(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path / "model.onnx").graph.node]


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simplify in this process; test_isolated_process.py tests the limits of a new one."""
    monkeypatch.setattr(
        simplify,
        "run_isolated",
        lambda module, arguments, limits: simplify.subprocess_main(arguments),
    )


def test_no_op_nodes_are_removed_and_outputs_are_equal(tmp_path: Path) -> None:
    source = graphs.make_artifact(tmp_path / "src", graphs.two_layer_classifier())
    split = graphs.make_split()
    ctx = harness.run_stage(
        Simplify(), SimplifySettings(), source, tmp_path / "out", data={"calibration": split}
    )
    assert "Identity" in nodes_of(tmp_path / "src")
    assert "Identity" not in nodes_of(tmp_path / "out")
    assert ctx.warnings == []
    assert (ctx.details["nodes_before"], ctx.details["parity"]["rows"]) == (6, 16 + 3)
    expected = graphs.class_logits(tmp_path / "src/model.onnx", split)
    np.testing.assert_allclose(
        graphs.class_logits(tmp_path / "out/model.onnx", split), expected, rtol=1e-5, atol=1e-5
    )
    assert (tmp_path / "out/signature.json").is_file()


def broken(source: Path, folder: Path) -> Any:
    """What an optimizer with a fault leaves: another sign."""
    model = onnx.load(source)
    model.graph.node.append(helper.make_node("Neg", ["minus"], ["logits"]))
    model.graph.node[-2].output[0] = "minus"
    return model


def with_its_batch(source: Path, folder: Path) -> Any:
    """What an optimizer leaves that takes the rows of a call for a constant: right for four of them."""
    model = onnx.load(source)
    model.graph.initializer.append(numpy_helper.from_array(np.array([4, 4]), "four_rows"))
    model.graph.node.append(helper.make_node("Reshape", ["flat", "four_rows"], ["logits"]))
    model.graph.node[-2].output[0] = "flat"
    return model


@pytest.mark.parametrize(("simplifier", "code"), [
    (broken, "outputs-changed"), (with_its_batch, "graph-failed"),
    (lambda *_: warning("onnxsim-failed", "why"), "onnxsim-failed"),
])  # fmt: skip
@pytest.mark.usefixtures("asked_here")
def test_simplified_graph_with_different_outputs_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simplifier: Any, code: str
) -> None:
    monkeypatch.setattr("smelt.export.simplify_graph.run_onnxsim", simplifier)
    monkeypatch.setattr("onnxslim.slim", lambda model: simplifier_of_model(model, simplifier))
    source = graphs.make_artifact(tmp_path / "src", graphs.two_layer_classifier())
    data = {"calibration": graphs.make_split()}
    ctx = harness.run_stage(Simplify(), SimplifySettings(), source, tmp_path / "out", data=data)
    assert (tmp_path / "out/model.onnx").read_bytes() == (tmp_path / "src/model.onnx").read_bytes()
    assert message_codes(ctx.warnings) == [code, code.replace("onnxsim", "onnxslim")]
    assert "parity" not in ctx.details  # the graph that was thrown away had it


def simplifier_of_model(model: Any, simplifier: Any) -> Any:
    """Return what the second tool gives where it has the same fault."""
    with TemporaryDirectory() as folder:
        result = simplifier(graphs.save_model(model, Path(folder, "model.onnx")), Path(folder))
    if isinstance(result, Message):
        raise ValueError("why")
    return result


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("installed", [True, False])
def test_onnxslim_is_used_where_onnxsim_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr("smelt.export.simplify_graph.run_onnxsim", broken)
    if not installed:
        monkeypatch.setattr(simplify, "find_spec", lambda name: None)
    source = graphs.make_artifact(tmp_path / "src", graphs.two_layer_classifier())
    split = graphs.make_split()
    data = {"calibration": split}
    ctx = harness.run_stage(Simplify(), SimplifySettings(), source, tmp_path / "out", data=data)
    assert ("Identity" in nodes_of(tmp_path / "out")) is not installed
    assert message_codes(ctx.warnings) == ([] if installed else ["outputs-changed"])
    assert ctx.details.get("simplified_by") == ("onnxslim" if installed else None)
    outputs = [graphs.class_logits(tmp_path / side / "model.onnx", split) for side in ("out", "src")]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-5)


def test_killed_simplifier_process_leaves_graph_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[Any] = []

    def stopped(module: str, arguments: Any, limit: Any) -> Any:
        limits.append(limit)
        raise IsolatedProcessError("it took more than 7 s of processor time", "time-limit")

    monkeypatch.setattr(simplify, "run_isolated", stopped)
    source = graphs.make_artifact(tmp_path / "src", graphs.two_layer_classifier())
    settings = SimplifySettings(time_limit_seconds=7, memory_gb=2)
    ctx = harness.run_stage(Simplify(), settings, source, tmp_path / "out")
    assert limits == [(2_000_000_000, 7)] * 2  # of onnxsim and of onnxslim
    assert "time-limit" in message_codes(ctx.warnings)
    assert nodes_of(tmp_path / "out") == nodes_of(tmp_path / "src")


def test_smelt_exported_graphs_are_rejected(tmp_path: Path) -> None:
    source = graphs.make_artifact(tmp_path / "src", graphs.two_layer_classifier(), foreign=False)
    with raises_code("needs-onnx-model", InputError):
        harness.run_stage(Simplify(), SimplifySettings(), source, tmp_path / "out")


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(("error", "is_unchanged"), [(4.8e-6, True), (4.8e-5, False)])
def test_rounding_of_large_softmax_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float, is_unchanged: bool
) -> None:
    """Its values deviate by 0.01 and its largest is 1, whose digits count."""
    weight = np.random.default_rng(0).normal(0, 4, (8, 6625)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "product"),
        helper.make_node("Softmax", ["m"], ["logits"], "softmax", axis=1),
    ]
    ends = [graphs.value_info("x", ["N", 8])], [graphs.value_info("logits", ["N", 6625])]
    model = graphs.make_model(nodes, *ends, [numpy_helper.from_array(weight, "w")])

    def changed(source: Path, folder: Path) -> Any:
        model = onnx.load(source)
        factor = numpy_helper.from_array(np.float32(1 + error), "factor")
        model.graph.initializer.append(factor)
        model.graph.node[1].output[0] = "before"
        model.graph.node.append(helper.make_node("Mul", ["before", "factor"], ["logits"], "times"))
        return model

    monkeypatch.setattr("smelt.export.simplify_graph.run_onnxsim", changed)
    monkeypatch.setattr(simplify, "find_spec", lambda name: None)
    source = graphs.make_artifact(tmp_path / "src", model)
    data = {"calibration": graphs.make_split()}
    ctx = harness.run_stage(Simplify(), SimplifySettings(), source, tmp_path / "out", data=data)
    assert ("Mul" in nodes_of(tmp_path / "out")) == is_unchanged
    assert (ctx.warnings == []) == is_unchanged


@pytest.mark.usefixtures("asked_here")
def test_missing_shapes_are_inferred_or_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = graphs.two_layer_classifier()
    model.graph.output[0].type.tensor_type.ClearField("shape")
    source = graphs.make_artifact(tmp_path / "src", model)
    data = {"calibration": graphs.make_split()}
    ctx = harness.run_stage(Simplify(), SimplifySettings(), source, tmp_path / "out", data=data)
    assert "Identity" not in nodes_of(tmp_path / "out")
    assert ctx.warnings == []
    model.graph.input[0].type.tensor_type.ClearField("shape")
    source_copy = graphs.make_artifact(tmp_path / "other", model)
    ctx = harness.run_stage(Simplify(), SimplifySettings(), source_copy, tmp_path / "out2", data=data)
    assert ctx.details["simplified_by"] == "onnxslim"  # which needs no number of dimensions
    monkeypatch.setattr(simplify, "find_spec", lambda name: None)
    ctx = harness.run_stage(Simplify(), SimplifySettings(), source_copy, tmp_path / "out3", data=data)
    assert message_codes(ctx.warnings) == ["missing-shape"]
