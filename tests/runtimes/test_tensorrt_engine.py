"""The calls of one engine: their order, and what each failure says.

The stand-in computes with ONNX Runtime on the addresses that it was given; its surface is compared with
the real bindings on the rig.
"""

import inspect
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from smelt.core.errors import InputError, RunError
from smelt.runtimes import tensorrt_backend
from smelt.runtimes.tensorrt_backend import TensorrtEngine
from smelt.runtimes.tensorrt_engine import EngineSidecar, graph_hash, write_sidecar
from tests.support.expected_errors import raises_code
from tests.support.processes import tensorrt_rig
from tests.support.standins import fake_tensorrt

SHAPES = {"x": [[1, 4], [2, 4], [8, 4]]}
W = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(tensorrt_backend, "CUDA_DEVICE", "cpu")


@pytest.fixture
def trt():
    return fake_tensorrt.Module()


def graph(folder, kind=TensorProto.FLOAT, rows="batch"):
    x = helper.make_tensor_value_info("x", kind, [rows, 4])
    y = helper.make_tensor_value_info("y", kind, [rows, 3])
    weight = numpy_helper.from_array(W.astype(helper.tensor_dtype_to_np_dtype(kind)), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y], [weight]), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 8
    onnx.save(model, folder / "model.onnx")
    fake_tensorrt.write_plan(folder / "model.onnx", SHAPES if rows == "batch" else {}, folder / "model.plan")
    return folder / "model.plan"


def stream(calls=None):
    waited = (lambda: None) if calls is None else (lambda: calls.append(("synchronize",)))
    return SimpleNamespace(cuda_stream=fake_tensorrt.STREAM, synchronize=waited)


def test_calls_are_in_the_order_required_by_the_api(trt, tmp_path):
    engine = TensorrtEngine(trt, graph(tmp_path), stream(trt.calls))
    assert trt.calls == [
        ("deserialize_cuda_engine",),
        ("set_optimization_profile_async", 0, fake_tensorrt.STREAM),
        ("synchronize",),
    ]
    trt.calls.clear()
    x = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 2]])
    out = engine({"x": x, "not asked for": x})
    assert trt.calls == [
        ("set_input_shape", "x", (2, 4)),
        ("set_tensor_address", "x"),
        ("infer_shapes",),
        ("get_tensor_shape", "y"),
        ("set_tensor_address", "y"),
        ("execute_async_v3", fake_tensorrt.STREAM),
    ]
    assert out["y"].tolist() == [[0.0, 1.0, 2.0], [18.0, 20.0, 22.0]]
    again = engine({"x": 2 * x})["y"]
    assert again.data_ptr() != out["y"].data_ptr()  # results of earlier calls stay what they were
    assert out["y"].tolist() == [[0.0, 1.0, 2.0], [18.0, 20.0, 22.0]]


def test_inputs_are_converted_to_dtype_and_layout_of_the_engine(trt, tmp_path):
    engine = TensorrtEngine(trt, graph(tmp_path, TensorProto.FLOAT16), stream())
    x = torch.tensor([[1.0, 0], [0, 0], [0, 0], [0, 2]], dtype=torch.float64).T  # neither half nor contiguous
    out = engine({"x": x})["y"]
    assert out.dtype is torch.float16
    assert out.tolist() == [[0.0, 1.0, 2.0], [18.0, 20.0, 22.0]]


def test_outputs_on_the_host_are_synchronized(trt, tmp_path):
    trt.answers["location"] = trt.TensorLocation.HOST
    engine = TensorrtEngine(trt, graph(tmp_path), stream(trt.calls))
    trt.calls.clear()
    engine({"x": torch.ones(1, 4)})
    assert trt.calls[-2:] == [("execute_async_v3", fake_tensorrt.STREAM), ("synchronize",)]


def test_maximum_length_reads_the_profile_and_fixed_sizes(trt, tmp_path):
    engine = TensorrtEngine(trt, graph(tmp_path), stream())
    assert (engine.max_dimension("x", 0), engine.max_dimension("x", 1)) == (8, 4)


@pytest.mark.parametrize(("method", "answer", "code", "values"), [
    ("infer_shapes", ["x"], "unknown-output-shape", (" x.",)),
    ("infer_shapes", RuntimeError("a shape tensor"), "shape-inference-failed", ("a shape tensor",)),
    ("get_tensor_shape", (-1, 3), "data-dependent-shape", ("(-1, 3)", "'y'")),
    ("set_tensor_address", False, "unbound-tensor", ("'x'",)),
    ("execute_async_v3", False, "engine-failed", ("Cuda failure: an illegal",)),
])  # fmt: skip
def test_each_failing_call_raises_run_error_with_its_reason(trt, tmp_path, method, answer, code, values):
    engine = TensorrtEngine(trt, graph(tmp_path), stream())
    trt.answers[method] = answer
    with raises_code(code, RunError) as caught:
        engine({"x": torch.ones(1, 4)})
    assert all(value in str(caught.value) for value in ("model.plan", *values))


def test_shape_outside_of_the_profile_names_both_and_the_setting(trt, tmp_path):
    engine = TensorrtEngine(trt, graph(tmp_path), stream())
    with raises_code("engine-limit", RunError) as caught:
        engine({"x": torch.ones(9, 4)})
    assert all(part in str(caught.value) for part in ("'x'", "(9, 4)", "(1, 4)", "(8, 4)", "max_batch_size"))
    fixed = TensorrtEngine(trt, graph(tmp_path, rows=2), stream())
    trt.answers["set_input_shape"] = False
    with raises_code("engine-limit", RunError) as caught:
        fixed({"x": torch.ones(3, 4)})
    assert "(2, 4)" in str(caught.value)


def test_missing_input_is_named(trt, tmp_path):
    engine = TensorrtEngine(trt, graph(tmp_path), stream())
    with raises_code("missing-input", RunError) as caught:
        engine({"input_ids": torch.ones(1, 4)})
    assert all(part in str(caught.value) for part in ("'x'", "input_ids"))


def test_unreadable_plan_is_reported_with_reason_and_remedy(trt, tmp_path):
    path = graph(tmp_path)
    path.write_bytes(b"another version's")
    with raises_code("unopened-engine", RunError) as caught:
        TensorrtEngine(trt, path, stream())
    assert "Serialization" in str(caught.value)


@pytest.mark.parametrize(("method", "answer", "code"), [
    ("create_execution_context", None, "no-execution-context"),
    ("set_optimization_profile_async", False, "unusable-profile"),
])  # fmt: skip
def test_failed_context_creation_is_explained(trt, tmp_path, method, answer, code):
    trt.answers[method] = answer
    with raises_code(code, RunError):
        TensorrtEngine(trt, graph(tmp_path), stream())


def test_dtype_unknown_to_torch_is_refused(trt, tmp_path):
    with raises_code("unsupported-dtype", RunError) as caught:
        TensorrtEngine(trt, graph(tmp_path, TensorProto.DOUBLE), stream())
    assert all(part in str(caught.value) for part in ("'x'", "DOUBLE"))


SURFACE = """
import json, tensorrt
names = {
    "ICudaEngine": fake["Engine"], "IExecutionContext": fake["Context"],
    "Runtime": {"deserialize_cuda_engine": 1}, "Refitter": fake["Refitter"],
    "OnnxParserRefitter": fake["OnnxParserRefitter"],
}
print(json.dumps({
    f"{kind}.{name}": getattr(getattr(tensorrt, kind), name).__doc__
    for kind, methods in names.items() for name in methods
} | {"places": [tensorrt.TensorLocation.HOST.name, tensorrt.TensorIOMode.INPUT.name],
     "types": list(tensorrt.DataType.__members__),
     "attributes": [hasattr(tensorrt.Runtime, "engine_host_code_allowed"),
                    hasattr(tensorrt.ICudaEngine, "num_optimization_profiles")],
     "flags": list(tensorrt.BuilderFlag.__members__)}))
"""


def test_fake_has_the_names_and_arguments_of_the_real_bindings():
    """What the tests above call is what the bindings of 11.4 have: every method, every argument's name."""
    methods = {
        cls.__name__: {
            name: list(inspect.signature(method).parameters)[1:]
            for name, method in vars(cls).items()
            if not name.startswith("_")
        }
        for cls in fake_tensorrt.SURFACE
    }
    done = subprocess.run(
        [sys.executable, "-c", f"fake = {methods!r}{SURFACE}"],
        env=tensorrt_rig.rig_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout)
    for kind, fake in (
        ("ICudaEngine", "Engine"), ("IExecutionContext", "Context"),
        ("Refitter", "Refitter"), ("OnnxParserRefitter", "OnnxParserRefitter"),
    ):  # fmt: skip
        for name, arguments in methods[fake].items():
            for argument in arguments:
                assert f"{argument}: " in real[f"{kind}.{name}"], (kind, name, argument)
    assert "Buffer" in real["Runtime.deserialize_cuda_engine"]
    assert real["places"] == ["HOST", "INPUT"]
    assert set(tensorrt_backend._TORCH_DTYPES) <= set(real["types"])
    assert real["attributes"] == [True, True]
    assert {"REFIT", "STRIP_PLAN", "REFIT_IDENTICAL", "VERSION_COMPATIBLE", "TF32"} <= set(real["flags"])


def beside(plan, **other):
    """Write a sidecar next to `plan`, as the stage does, with `other` fields."""
    options = {
        "package": "tensorrt", "version": "11.4.0", "gpu": None, "graph": "model.onnx",
        "graph_sha256": graph_hash(plan.with_suffix(".onnx")), "size_bytes": plan.stat().st_size,
        "weights": "embedded", "version_compatible": False, "hardware_compatibility": "none", "flags": {},
        "profiles": [],
    }  # fmt: skip
    write_sidecar(plan, EngineSidecar(**(options | other)))
    return plan


def test_each_call_uses_the_smallest_sufficient_profile(trt, tmp_path):
    plan = graph(tmp_path)
    shapes = [
        {"x": [[1, 4], [4, 4], [8, 4]]},
        {"x": [[1, 4], [1, 4], [1, 4]]},
        {"x": [[2, 4], [2, 4], [4, 4]]},
    ]
    fake_tensorrt.write_plan(tmp_path / "model.onnx", shapes, plan)
    engine = TensorrtEngine(trt, plan, stream())
    assert engine.max_dimension("x", 0) == 8
    trt.calls.clear()
    for rows in (1, 1, 3, 5, 3, 8):
        assert engine({"x": torch.ones(rows, 4)})["y"].shape == (rows, 3)
    chosen = [call[1] for call in trt.calls if call[0] == "set_optimization_profile_async"]
    assert chosen == [1, 2, 0, 2, 0]  # only where it changes
    with raises_code("engine-limit", RunError) as caught:
        engine({"x": torch.ones(9, 4)})
    assert all(part in str(caught.value) for part in ("(9, 4)", "(1, 4)", "(8, 4)"))


def test_engine_without_weights_is_refitted_from_the_graph_next_to_it(trt, tmp_path):
    plan = beside(graph(tmp_path), weights="stripped")
    TensorrtEngine(trt, plan, stream())
    names = [call[0] for call in trt.calls]
    assert names[:3] == ["deserialize_cuda_engine", "refit_from_file", "refit_cuda_engine"]
    assert ("refit_from_file", "model.onnx") in trt.calls
    trt.answers["refit_from_file"] = False
    with raises_code("refit-failed", RunError) as caught:
        TensorrtEngine(trt, plan, stream())
    assert all(part in str(caught.value) for part in ("model.plan", "model.onnx"))


@pytest.mark.parametrize("compatible", [True, False])
def test_embedded_runtime_is_allowed_only_for_plans_that_have_one(trt, tmp_path, compatible):
    TensorrtEngine(trt, beside(graph(tmp_path), version_compatible=compatible), stream())
    assert trt.runtime.engine_host_code_allowed is compatible


def test_engine_of_another_version_is_refused_before_reading(trt, tmp_path):
    plan = beside(graph(tmp_path), version="11.3.0")
    with raises_code("wrong-engine-version", InputError) as caught:
        TensorrtEngine(trt, plan, stream())
    assert all(part in str(caught.value) for part in ("11.3.0", "11.4.0"))
    assert trt.calls == []
