"""Whole recipes of a user's PyTorch module with arrays as inputs and outputs."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import smelt
from tests.support import harness
from tests.support.models import array_modules

TRAINING = "max_steps: 12, batch_size: 8, num_evals: 1, precision: fp32, learning_rate: 0.01"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(tmp_path, function, stages):
    recipe = array_modules.write_recipe(array_modules.write_module(tmp_path, function), function, stages)
    steps = smelt.run(recipe, out=tmp_path / "run").report["steps"]
    assert [step["status"] for step in steps] == ["done"] * len(steps), [step["error"] for step in steps]
    return {step["name"]: step for step in steps}


def test_module_with_two_outputs_is_factorized_distilled_quantized_and_exported(tmp_path):
    steps = run(tmp_path, "two_heads", (
        "factorize: {method: svd, keep_ratio: 0.5, optimize_for: size}",
        f"distill: {{{TRAINING}}}",
        "quantize: {scheme: int8-static}",
        "onnx",
    ))  # fmt: skip
    assert not {"network.position", "network.kind"} & {*steps["factorize"]["details"]["ranks"]}
    agreement = {name: step["quality"]["agreement"]["value"] for name, step in steps.items()}
    assert agreement["model"] == 100
    assert agreement["distill"] > agreement["factorize"]
    losses = [each["loss"] for each in steps["distill"]["details"]["training"]["validations"]]
    assert losses[-1] < 0.7 * losses[0]
    assert steps["onnx"]["details"]["parity"]["model"]["operators"] >= 4
    assert agreement["onnx"] == pytest.approx(agreement["quantize"], abs=0.2)


def test_model_and_graph_return_the_outputs_of_the_module_by_name(tmp_path):
    run(tmp_path, "two_heads", ("onnx",))
    samples = np.load(tmp_path / "test.npz")
    signal, code = samples["signal"].astype(np.float32), samples["code"]
    with torch.no_grad():
        expected = array_modules.build("two_heads")(torch.from_numpy(signal), torch.from_numpy(code))
    for name in ("model", "onnx"):
        with smelt.load(tmp_path / "run" / "artifacts" / name) as model:
            outputs = model.run({"signal": samples["signal"], "code": code})
        assert {*outputs} == {"position", "kind"}
        for key, value in expected.items():
            np.testing.assert_allclose(outputs[key], value.numpy(), atol=1e-5)
    session = onnxruntime.InferenceSession(tmp_path / "run/artifacts/onnx/model.onnx")
    (position,) = session.run(["position"], {"signal": signal[:3], "code": code[:3]})
    np.testing.assert_allclose(position, expected["position"][:3].numpy(), atol=1e-5)


def test_convolutions_and_optional_inputs_are_scored_by_an_own_metric(tmp_path, monkeypatch):
    steps = run(tmp_path, "denoiser", (
        "factorize: {method: tucker, keep_ratio: 0.5, optimize_for: size}",
        f"distill: {{{TRAINING}, losses: {{outputs: 1, hidden_states: 0.5}},"
        " layer_map: {network.start: network.start}}",
        "quantize: {scheme: int8-static}",
        "onnx",
        "sparsify: {method: wanda, sparsity: 0.5}\n    from: model",
        "quantize: {scheme: int4, group_size: 16}\n    name: int4",
        "onnx: {}\n    name: onnx4",
    ))  # fmt: skip
    assert steps["factorize"]["operations"] < 0.7 * steps["model"]["operations"]
    assert steps["sparsify"]["details"]["sparsity"] == pytest.approx(0.5, abs=0.01)
    for name in ("onnx", "onnx4"):
        assert steps[name]["quality"]["agreement"]["value"] > 95
    artifacts = tmp_path / "run" / "artifacts"
    operators = {node.op_type for node in onnx.load(artifacts / "onnx" / "model.onnx").graph.node}
    assert "Conv" in operators
    assert "BatchNormalization" not in operators
    samples = np.load(tmp_path / "test.npz")
    with torch.no_grad():
        inputs = [torch.from_numpy(samples[name].astype(np.float32)) for name in ("image", "gain")]
        clean = array_modules.build("denoiser")(*inputs).numpy()
    error = float(((clean - samples["clean"]) ** 2).mean())
    monkeypatch.chdir(tmp_path)  # the folder of the metric
    scored = harness.smelt(
        "eval", artifacts / "model", "--baseline", artifacts / "model", "--data", tmp_path / "test.npz",
        "--metric", "my_metrics:error", "--json", code=0,
    )  # fmt: skip
    assert f"{error:.4f}" in scored.stdout


def test_module_with_one_number_per_sample_is_distilled_and_exported(tmp_path):
    steps = run(tmp_path, "one_number", (f"distill: {{{TRAINING}}}", "onnx"))
    assert steps["onnx"]["quality"]["agreement"]["value"] > 99
    signal = np.load(tmp_path / "test.npz")["signal"].astype(np.float32)
    artifacts = tmp_path / "run" / "artifacts"
    with smelt.load(artifacts / "distill") as model:
        expected = model.run({"signal": signal})["output"]
    session = onnxruntime.InferenceSession(artifacts / "onnx" / "model.onnx")
    (output,) = session.run(["output"], {"signal": signal})
    assert output.shape == (len(signal),)
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_forward_that_reads_values_is_factorized_without_counting_operations(tmp_path):
    steps = run(tmp_path, "branching", ("factorize: {method: tucker, keep_ratio: 0.5, optimize_for: size}",))
    assert steps["factorize"]["parameters"] < steps["model"]["parameters"]
    assert "flops_before" not in steps["factorize"]["details"]
