"""The onnx stage with target openvino: its settings, what it refuses, how it is compared."""

import numpy as np
import onnx
import pytest

from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.messages import message_codes
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.runtimes import openvino_backend
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.graphs import graph_exports
from tests.support.graphs.ort_sessions import needs_vnni
from tests.support.models import tiny
from tests.support.pairs.matrix import is_full_matrix, matrix_cells


@pytest.mark.parametrize("family", ["bert", "t5"] if is_full_matrix() else ["bert"])
def test_bf16_is_held_to_fp32s_tolerance_in_float32_and_to_its_own_as_deployed(family):
    parity = graph_exports.exported_graphs(family, "fp32", "openvino", "bf16").details["parity"]
    for found in parity.values():
        assert found["exact"]["largest"] < 1e-4
        assert found["mean"] < 0.1
        if openvino_backend.has_bf16():
            assert found["mean"] > 1e-3  # it really was another precision


@pytest.mark.parametrize(
    "settings", [{"target": "openvino", "dtype": "fp16"}, {"target": "ort-cpu", "dtype": "bf16"}]
)
def test_precisions_that_a_target_does_not_have(settings):
    with raises_setting_codes("unsupported-dtype"):
        OnnxSettings(**settings)


def test_quantized_models_are_refused_and_the_target_that_can_is_named(tmp_path):
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings

    make, task = graph_exports.FAMILIES["marian"]
    ctx = graph_exports.make_context(tmp_path / "codes", task)
    Quantize()(
        tiny.as_artifact(make(tmp_path / "m"), task), QuantizeSettings(**graph_exports.SCHEMES["binary"]), ctx
    )
    with raises_code("unsupported-scheme", InputError) as caught:
        Onnx()(
            tiny.as_artifact(ctx.out, task),
            OnnxSettings(target="openvino"),
            graph_exports.make_context(tmp_path / "o", task),
        )
    assert "target openvino" in str(caught.value)
    assert "ort-cpu" in str(caught.value)


def test_a_scheme_that_no_target_runs_is_refused_with_those_that_this_one_does(tmp_path):
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings

    make, task = graph_exports.FAMILIES["bert"]
    ctx = graph_exports.make_context(tmp_path / "codes", task)
    Quantize()(tiny.as_artifact(make(tmp_path / "m"), task), QuantizeSettings(scheme="bnb-int8"), ctx)
    for target, schemes in (
        ("openvino", "int8-static or int8-groupwise or int4."),
        ("ort-cpu", "int8-dynamic or int8-static or "),
    ):
        with raises_code("unsupported-scheme", InputError) as caught:
            Onnx()(
                tiny.as_artifact(ctx.out, task),
                OnnxSettings(target=target),
                graph_exports.make_context(tmp_path / target, task),
            )
        assert f"target {target} " in str(caught.value)
        assert f" {schemes}" in str(caught.value)


def test_of_mixed_precision_the_schemes_that_do_not_run_are_named_and_the_widths_that_do():
    from torch import nn

    from smelt.compress.quantize.plan_layers import quantize_module
    from smelt.export.onnx_stage import tolerance_kind

    mixed = nn.ModuleList(quantize_module(nn.Linear(32, 8), scheme) for scheme in ("int4", "int2"))
    with raises_code("unsupported-scheme", InputError) as caught:
        tolerance_kind(mixed, OnnxSettings(target="openvino"))
    assert "scheme int2: " in str(caught.value)
    assert str(caught.value).endswith("`mixed_precision: {bit_widths: [4, 8]}`.")
    with raises_code("unsupported-scheme", InputError) as caught:
        tolerance_kind(mixed[1:], OnnxSettings(target="openvino"))
    assert "scheme int2: " in str(caught.value)
    assert str(caught.value).endswith("int8-groupwise or int4.")


def test_a_processor_without_bf16_is_told_of(tmp_path, monkeypatch):
    make, task = graph_exports.FAMILIES["bert"]
    monkeypatch.setattr(openvino_backend, "has_bf16", lambda: False)
    ctx = graph_exports.make_context(tmp_path / "onnx", task)
    Onnx()(tiny.as_artifact(make(tmp_path / "m"), task), OnnxSettings(target="openvino", dtype="bf16"), ctx)
    assert "no-bf16" in message_codes(ctx.warnings)


def test_a_missing_openvino_stops_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(openvino_backend, "has_openvino", lambda: False)
    ctx = graph_exports.make_context(tmp_path / "onnx", "translation")
    source = tiny.as_artifact(tmp_path / "not-there", "translation")
    with raises_code("not-installed", MissingDependencyError) as caught:
        Onnx()(source, OnnxSettings(target="openvino"), ctx)
    assert "openvino>=2026" in str(caught.value)
    assert not list(ctx.out.iterdir())


@needs_vnni
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_static_int8_runs_in_int8_and_gives_what_its_parent_gives(dtype):
    from smelt.runtimes.openvino_backend import compile_graph, has_bf16

    made = graph_exports.exported_graphs("bert", "static", "openvino", dtype)
    found = made.details["parity"]["model"]
    assert found["mean"] < 0.1
    assert found["operators"] > 0
    nodes = compile_graph(made.folder / "model.onnx", dtype, 1).get_runtime_model().get_ops()
    infos = [node.get_rt_info() for node in nodes]
    products = [info for info in infos if info["layerType"].astype(str) == "FullyConnected"]
    assert len(products) == found["operators"]
    assert {info["runtimePrecision"].astype(str) for info in products} == {"i8"}
    # what lies between the products is computed in the dtype
    between = {
        info["runtimePrecision"].astype(str) for info in infos if info["layerType"].astype(str) == "Softmax"
    }
    assert between == {"bf16" if dtype == "bf16" and has_bf16() else "f32"}


def products_of(path, dtype="fp32"):
    """Return of OpenVINO's compiled graph the element types of all constants of more than 1,000 values."""
    ops = openvino_backend.compile_graph(path, dtype, 1).get_runtime_model().get_ops()
    shapes = [op for op in ops if op.get_rt_info()["layerType"].astype(str) == "Const"]
    large = [op for op in shapes if np.prod(list(op.get_output_shape(0))) > 1000]
    return {op.get_rt_info()["outputPrecisions"].astype(str) for op in large}


@pytest.mark.parametrize(
    ("family", "scheme"), matrix_cells(["bert", "m2m_100", "llama", "vit"], ["int4", "groupwise"])
)
def test_codes_in_groups_run_as_standard_operators_and_give_what_their_parent_gives(family, scheme):
    made = graph_exports.exported_graphs(family, scheme, "openvino")
    for path in made.folder.glob("*.onnx"):
        assert {node.domain for node in onnx.load(path).graph.node} <= {"", "ai.onnx"}
    for found in made.details["parity"].values():
        assert found["exact"]["largest"] < 1e-4
        assert found["mean"] < 0.1
    assert made.details["opset"] == 21
    types = products_of(made.folder / f"{made.subject.graphs[-1].name}.onnx")
    assert {"int4": "u4", "groupwise": "u8"}[scheme] in types
