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
def test_bf16_passes_exact_and_deployed_tolerances(family):
    parity = graph_exports.exported_graphs(family, "fp32", "openvino", "bf16").details["parity"]
    for differences in parity.values():
        assert differences["exact"]["largest"] < 1e-4
        assert differences["mean"] < 0.1
        if openvino_backend.has_bf16():
            assert differences["mean"] > 1e-3  # it really was another precision


@pytest.mark.parametrize(
    "settings", [{"target": "openvino", "dtype": "fp16"}, {"target": "ort-cpu", "dtype": "bf16"}]
)
def test_unsupported_precisions_are_rejected(settings):
    with raises_setting_codes("unsupported-dtype"):
        OnnxSettings(**settings)


def test_unsupported_quantized_model_error_names_supported_target(tmp_path):
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings

    make_source, task = graph_exports.FAMILIES["marian"]
    ctx = graph_exports.make_context(tmp_path / "codes", task)
    Quantize()(
        tiny.as_artifact(make_source(tmp_path / "m"), task),
        QuantizeSettings(**graph_exports.SCHEMES["binary"]),
        ctx,
    )
    with raises_code("unsupported-scheme", InputError) as excinfo:
        Onnx()(
            tiny.as_artifact(ctx.out, task),
            OnnxSettings(target="openvino"),
            graph_exports.make_context(tmp_path / "o", task),
        )
    assert "target openvino" in str(excinfo.value)
    assert "ort-cpu" in str(excinfo.value)


def test_scheme_without_target_error_lists_supported_schemes(tmp_path):
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings

    make_source, task = graph_exports.FAMILIES["bert"]
    ctx = graph_exports.make_context(tmp_path / "codes", task)
    Quantize()(tiny.as_artifact(make_source(tmp_path / "m"), task), QuantizeSettings(scheme="bnb-int8"), ctx)
    for target, schemes in (
        ("openvino", "int8-static or int8-groupwise or int4."),
        ("ort-cpu", "int8-dynamic or int8-static or "),
    ):
        with raises_code("unsupported-scheme", InputError) as excinfo:
            Onnx()(
                tiny.as_artifact(ctx.out, task),
                OnnxSettings(target=target),
                graph_exports.make_context(tmp_path / target, task),
            )
        assert f"target {target} " in str(excinfo.value)
        assert f" {schemes}" in str(excinfo.value)


def test_mixed_precision_error_names_unsupported_scheme_and_supported_bits():
    from torch import nn

    from smelt.compress.quantize.plan_layers import quantize_module
    from smelt.export.scheme_support import tolerance_kind

    mixed = nn.ModuleList(quantize_module(nn.Linear(32, 8), scheme) for scheme in ("int4", "int2"))
    with raises_code("unsupported-scheme", InputError) as excinfo:
        tolerance_kind(mixed, OnnxSettings(target="openvino"))
    assert "scheme int2: " in str(excinfo.value)
    assert str(excinfo.value).endswith("`mixed_precision: {bit_widths: [4, 8]}`.")
    with raises_code("unsupported-scheme", InputError) as excinfo:
        tolerance_kind(mixed[1:], OnnxSettings(target="openvino"))
    assert "scheme int2: " in str(excinfo.value)
    assert str(excinfo.value).endswith("int8-groupwise or int4.")


def test_cpu_without_bf16_is_reported(tmp_path, monkeypatch):
    make_source, task = graph_exports.FAMILIES["bert"]
    monkeypatch.setattr(openvino_backend, "has_bf16", lambda: False)
    ctx = graph_exports.make_context(tmp_path / "onnx", task)
    Onnx()(
        tiny.as_artifact(make_source(tmp_path / "m"), task),
        OnnxSettings(target="openvino", dtype="bf16"),
        ctx,
    )
    assert "no-bf16" in message_codes(ctx.warnings)


def test_missing_openvino_is_rejected_early(tmp_path, monkeypatch):
    monkeypatch.setattr(openvino_backend, "has_openvino", lambda: False)
    ctx = graph_exports.make_context(tmp_path / "onnx", "translation")
    source = tiny.as_artifact(tmp_path / "not-there", "translation")
    with raises_code("not-installed", MissingDependencyError) as excinfo:
        Onnx()(source, OnnxSettings(target="openvino"), ctx)
    assert "openvino>=2026" in str(excinfo.value)
    assert not list(ctx.out.iterdir())


@needs_vnni
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_static_int8_runs_in_int8_and_equals_parent(dtype):
    from smelt.runtimes.openvino_backend import compile_graph, has_bf16

    exported = graph_exports.exported_graphs("bert", "static", "openvino", dtype)
    differences = exported.details["parity"]["model"]
    assert differences["mean"] < 0.1
    assert differences["operators"] > 0
    nodes = compile_graph(exported.folder / "model.onnx", dtype, 1).get_runtime_model().get_ops()
    infos = [node.get_rt_info() for node in nodes]
    products = [info for info in infos if info["layerType"].astype(str) == "FullyConnected"]
    assert len(products) == differences["operators"]
    # activations of int8 would have 128 added to them in the inner loop of the kernel
    assert {info["runtimePrecision"].astype(str) for info in products} == {"u8"}
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
    ("family", "scheme"),
    matrix_cells(
        ["bert", "vit", "m2m_100", "llama"] if is_full_matrix() else ["bert", "vit"], ["int4", "groupwise"]
    ),
)
def test_grouped_weights_use_standard_operators_and_equal_parent(family, scheme):
    exported = graph_exports.exported_graphs(family, scheme, "openvino")
    for path in exported.folder.glob("*.onnx"):
        assert {node.domain for node in onnx.load(path).graph.node} <= {"", "ai.onnx"}
    for differences in exported.details["parity"].values():
        assert differences["exact"]["largest"] < 1e-4
        assert differences["mean"] < 0.1
    assert exported.details["opset"] == 21
    types = products_of(exported.folder / f"{exported.subject.graphs[-1].name}.onnx")
    assert {"int4": "u4", "groupwise": "u8"}[scheme] in types
