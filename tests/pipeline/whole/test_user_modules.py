"""Whole recipes of a user's PyTorch module: the example of the page, and the stages of linear layers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from safetensors.torch import save_file

import smelt
from smelt.core.errors import InputError
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import array_modules, text_modules, user_modules

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "pytorch-modules.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def finished_steps(report):
    steps = report["steps"]
    assert [s["status"] for s in steps] == ["done"] * len(steps), [s["error"] for s in steps]
    return {step["name"]: step for step in steps}


def test_example_of_page_can_be_run(tmp_path, monkeypatch):
    nets, script, *_ = (text for language, text in BLOCKS if language == "python")
    blocks = dict(reversed(BLOCKS))  # the first of each language
    (tmp_path / "nets.py").write_text(nets)
    (tmp_path / "make_model.py").write_text(script)
    (tmp_path / "small.yaml").write_text(blocks["yaml"])
    monkeypatch.chdir(tmp_path)
    python_command, *commands = [line.partition("  #")[0].split() for line in blocks["bash"].splitlines()]
    subprocess.run([sys.executable, *python_command[1:]], check=True)
    outputs = {}
    for program, command, *arguments in commands:
        assert program == "smelt"
        # latency takes most of the time, and is not the page's subject
        more = ["--set", "score.latency=false"] if command in ("plan", "run") else []
        outputs[command] = harness.smelt(command, *arguments, *more, code=0).output
    assert "nets:small_net" in outputs["plan"]
    steps = finished_steps(json.loads(Path("runs/small/report.json").read_text()))
    sizes = [steps[name]["size_bytes"] for name in ("trained", "prune", "quantize")]
    assert sizes == sorted(sizes, reverse=True)
    assert steps["onnx-int8"]["quality"]["accuracy"]["value"] > 90
    assert outputs["predict"].split()[0] == "dark"
    assert Path("package/infer.py").is_file()
    graph = onnx.load("runs/small/artifacts/onnx-int8/model.onnx")
    kinds = [node.op_type for node in graph.graph.node]
    assert "BatchNormalization" not in kinds
    assert kinds.count("Conv") == 5
    assert graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    _check_artifacts_without_code(tmp_path, monkeypatch)


@pytest.mark.parametrize("module", ["nets:text_cnn", "heads:two_heads"])
def test_examples_of_other_tasks_can_be_planned(module, tmp_path):
    """Those of texts and of arrays, whose recipes name their files."""
    file, function = module.split(":")
    code = next(text for _, text in BLOCKS if f"def {function}()" in text)
    recipe = next(text for _, text in BLOCKS if f"module: {module}" in text)
    text_modules.write_module(tmp_path)
    (tmp_path / f"{file}.py").write_text(code.replace("30522", "23"))
    namespace = {"__name__": file}
    exec(compile((tmp_path / f"{file}.py").read_text(), file, "exec"), namespace)
    weights = re.search(r"weights: ([\w.]+)", recipe).group(1)
    save_file(namespace[function]().state_dict(), tmp_path / weights)
    for split in ("train", "validation", "test"):
        array_modules.write_samples(tmp_path / f"{split}.npz", 4, 0)
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert load_plan(tmp_path / "recipe.yaml").user_functions == [module]


def _check_artifacts_without_code(folder, monkeypatch):
    """Torch artifacts need the code in the user's cache; exported graphs do not."""
    artifacts, image = folder / "runs" / "small" / "artifacts", str(folder / "data/test/light/0.png")
    with smelt.load(artifacts / "small") as model:
        assert model.classify([image])[0].label == "light"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "other-cache"))
    with raises_code("untrusted-module", InputError), smelt.load(artifacts / "small") as model:
        model.classify([image])
    with smelt.load(artifacts / "onnx-int8") as model:
        assert model.classify([image])[0].label == "light"


def test_mixer_is_sparsified_factorized_quantized_and_exported(tmp_path):
    user_modules.write_module(tmp_path, "mixer")
    training = "max_steps: 3, batch_size: 4, num_evals: 1, precision: fp32"
    recipe = user_modules.write_recipe(tmp_path, "mixer", (
        "sparsify: {method: wanda, sparsity: 0.5, calibration_samples: 8}",
        f"distill: {{{training}}}",
        "quantize: {scheme: int4, group_size: 16}",
        "onnx",
        "factorize: {method: whitened-svd, keep_ratio: 0.5, optimize_for: size, calibration_samples: 8}\n"
        "    from: model",
        "quantize: {scheme: int8-dynamic}\n    name: dynamic",
        "onnx: {}\n    name: dynamic-onnx",
    ))  # fmt: skip
    steps = finished_steps(smelt.run(recipe, out=tmp_path / "run").report)
    assert steps["sparsify"]["details"]["sparsity"] == pytest.approx(0.5, abs=0.01)
    assert len(steps["sparsify"]["details"]["sparsity_by_layer"]) == 8
    assert steps["factorize"]["parameters"] < 0.8 * steps["model"]["parameters"]
    assert "network.head" not in steps["factorize"]["details"]["ranks"]
    assert steps["quantize"]["details"]["linear_layers"] == 9  # with the output layer
    for name in ("onnx", "dynamic-onnx"):
        assert steps[name]["details"]["parity"]["model"]["operators"] > 4
    assert (tmp_path / "run" / "nets.py").is_file()


def test_edited_code_starts_the_run_again(tmp_path):
    user_modules.write_module(tmp_path, "mixer")
    recipe = user_modules.write_recipe(tmp_path, "mixer", ("quantize: {scheme: int4}",))
    keys = []
    for text in (user_modules.CODE, user_modules.CODE, user_modules.CODE + "\n# edited\n"):
        (tmp_path / "nets.py").write_text(text)
        report = smelt.run(recipe, out=tmp_path / "run").report
        keys.append([step["key"] for step in report["steps"]])
    assert keys[0] == keys[1]
    assert not set(keys[0]) & set(keys[2])


def test_module_that_fails_ends_the_run_with_its_own_error(tmp_path):
    user_modules.write_module(tmp_path, "limited")
    recipe = user_modules.write_recipe(tmp_path, "limited", ("onnx",))
    (step, *_) = smelt.run(recipe, out=tmp_path / "run").report["steps"]
    assert step["error"]["code"] == "module-failed"


def test_forward_that_reads_values_is_not_pruned_and_warned_about_once(tmp_path):
    user_modules.write_module(tmp_path, "branching")
    stages = ("prune: {targets: [channels]}", "quantize: {scheme: int8-static}\n    from: model")
    recipe = user_modules.write_recipe(tmp_path, "branching", stages)
    report = smelt.run(recipe, out=tmp_path / "run").report
    steps = {step["name"]: step for step in report["steps"]}
    assert steps["prune"]["error"]["code"] == "not-prunable"
    assert steps["quantize"]["status"] == "done"
    codes = [message["code"] for message in report["warnings"]]
    assert codes.count("operations-not-counted") == 1


def test_json_has_nothing_that_the_module_prints(tmp_path):
    user_modules.write_module(tmp_path, "printing")
    (tmp_path / "nets.py").write_text(f"print('imported')\n{user_modules.CODE}")
    recipe = user_modules.write_recipe(tmp_path, "printing", ("onnx",))
    planned = harness.smelt("plan", recipe, "--json", code=0)
    json.loads(planned.stdout)
    assert {"imported", "built", "called"} <= set(planned.stderr.split())
    smelt.run(recipe, out=tmp_path / "run", until="model")
    artifact, image = tmp_path / "run/artifacts/model", next(tmp_path.rglob("*.png"))
    predicted = harness.smelt("predict", artifact, image, "--json", code=0)
    assert len([json.loads(line) for line in predicted.stdout.splitlines()]) == 1
    scored = harness.smelt("eval", artifact, "--data", tmp_path / "test.jsonl", "--json", code=0)
    json.loads(scored.stdout)
    for each in (predicted, scored):
        assert "called" in each.stderr.split()


def test_convolutions_are_factorized(tmp_path):
    user_modules.write_module(tmp_path, "cnn")
    stages = ("factorize: {method: tucker, keep_ratio: 0.5, optimize_for: size}", "onnx")
    steps = finished_steps(
        smelt.run(user_modules.write_recipe(tmp_path, "cnn", stages), out=tmp_path / "run").report
    )
    factorized = set(steps["factorize"]["details"]["ranks"])
    assert factorized >= {"network.blocks.0.conv1", "network.blocks.2.conv1"}
    assert not any("depthwise" in name for name in factorized)
