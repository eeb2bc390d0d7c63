"""The formats torch-export and executorch: another process opens the file, without smelt, and agrees."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import smelt
from smelt.api.package import package_artifact
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import InputError, MissingDependencyError, RunError
from smelt.export.package.torch_program import TorchProgram, TorchProgramFormat
from smelt.generation.backend import Batch
from smelt.runtimes.images import ImageBatch
from smelt.runtimes.registry import open_folder
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import images, masked, taggers, tiny
from tests.support.shared_folders import make_once

# A process that has torch alone: reads arrays, runs the program, writes its output.
RUN = """
import sys
sys.modules.update(dict.fromkeys(["smelt", "transformers"]))
import numpy, torch
inputs = {name: torch.from_numpy(array) for name, array in numpy.load("inputs.npz").items()}
model = torch.export.load("model.pt2").module()
numpy.save("output.npy", model(**inputs).numpy())
"""
RUN_EXECUTORCH = """
import sys
sys.modules.update(dict.fromkeys(["smelt", "transformers"]))
import numpy, torch
from executorch.runtime import Runtime
inputs = [torch.from_numpy(array) for array in numpy.load("inputs.npz").values()]
method = Runtime.get().load_program("model.pte").load_method("forward")
numpy.save("output.npy", method.execute(inputs)[0].numpy())
"""
WRITERS = {"tagger": (taggers.write_model, taggers.TASK), "masked": (masked.write_model, masked.TASK)}


def torch_artifact(kind):
    """Return the torch artifact of a kind of `exported_artifacts`, or a folder made into one."""
    if kind not in WRITERS:
        return exported_artifacts.exported_artifact(kind, "model")
    write, task = WRITERS[kind]

    def make(home):
        home.mkdir()
        write(home / "m")
        data = (taggers.write_rows if kind == "tagger" else masked.write_lines)(
            home / ("rows.jsonl" if kind == "tagger" else "rows.txt")
        )
        recipe = (
            f"model: m\ntask: {task}\ndata: {{test: {data.name}}}\nstages: []\nscore: {{latency: false}}\n"
        )
        (home / "recipe.yaml").write_text(recipe)
        smelt.run(home / "recipe.yaml", out=home / "run", quiet=True)

    return make_once(f"program-{kind}", make) / "run" / "artifacts" / "model"


def inputs_of(names, rows, length):
    """Return arrays of these names, and the batch of them; the last row is padded."""
    if names == ["pixel_values"]:
        pixels = np.random.default_rng(0).normal(size=(rows, 3, images.IMAGE_SIZE, images.IMAGE_SIZE))
        return {"pixel_values": pixels.astype(np.float32)}, ImageBatch(pixels.astype(np.float32))
    ids = np.random.default_rng(0).integers(5, 15, size=(rows, length))
    mask = np.ones_like(ids)
    mask[-1, length // 2 :] = 0
    arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {name: arrays[name] for name in names}, Batch(ids, mask)


def outputs(folder, program, arrays):
    np.savez(folder / "inputs.npz", **arrays)
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, timeout=300)
    return np.load(folder / "output.npy")


def input_names(folder):
    return json.loads(re.search(r"for name in (\[.*?\])", (folder / "README.md").read_text())[1])


# a process that imports torch takes 4 s
@pytest.mark.parametrize("kind", ["classifier", "embedder", "tagger", "masked", "vit"])
def test_program_equals_its_model_in_another_process(kind, tmp_path):
    artifact = torch_artifact(kind)
    folder = package_artifact(artifact, format="torch-export", out=tmp_path / "package").folder
    arrays, batch = inputs_of(input_names(folder), 3, 7)
    with open_folder(artifact, "torch", None, 1) as runner:
        expected = runner.forward(batch)
    actual = outputs(folder, RUN, arrays)
    assert actual.shape == expected.shape
    real = actual if kind not in ("tagger", "masked") else actual[batch.attention_mask == 1]
    np.testing.assert_allclose(
        real, expected if real is actual else expected[batch.attention_mask == 1], atol=1e-5
    )


@pytest.mark.parametrize("kind", ["classifier", "vit"])
def test_executorch_program_equals_its_model_in_another_process(kind, tmp_path):
    pytest.importorskip("executorch.runtime", reason="pip install 'smelt[executorch]'")
    artifact = torch_artifact(kind)
    folder = package_artifact(artifact, format="executorch", out=tmp_path / "package").folder
    for length in (3, 11):
        arrays, batch = inputs_of(input_names(folder), 1, length)
        with open_folder(artifact, "torch", None, 1) as runner:
            expected = runner.forward(batch)
        np.testing.assert_allclose(outputs(folder, RUN_EXECUTORCH, arrays), expected, atol=1e-5)


def list_two_inputs(folder):
    """Let the tokenizer list no token types, as one that was trained for a model without a tokenizer."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"model_input_names": ["input_ids", "attention_mask"]}
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize("lists_token_types", [True, False])
def test_readme_command_answers(lists_token_types, tmp_path):
    folder = package_artifact(
        torch_artifact("classifier"), format="torch-export", out=tmp_path / "package"
    ).folder
    if not lists_token_types:
        list_two_inputs(folder)
    command = re.search(r"```bash\n.*?\n(python .*?)\n```", (folder / "README.md").read_text(), re.S)[1]
    done = subprocess.run(
        ["bash", "-c", command.replace("python ", f"{sys.executable} ", 1)],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tensor([[" in done.stdout


def test_missing_executorch_is_an_error_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "executorch", None)
    monkeypatch.setitem(sys.modules, "executorch.runtime", None)
    with raises_code("not-installed", MissingDependencyError):
        package_artifact(torch_artifact("classifier"), format="executorch", out=tmp_path / "package")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("name", ["torch-export", "executorch"])
def test_models_that_generate_and_graphs_are_refused(name, tmp_path):
    for kind, step, code in (
        ("translator", "model", "unsupported-task"),
        ("classifier", "onnx", "unsupported-format"),
    ):
        artifact = exported_artifacts.exported_artifact(kind, step)
        with raises_code(code, InputError):
            package_artifact(artifact, format=name, out=tmp_path / "package")


def test_quantized_layers_are_refused_with_a_name(tmp_path):
    ctx = harness.run_stage(
        Quantize(), QuantizeSettings(scheme="int8-dynamic"), torch_artifact("classifier"), tmp_path / "q",
        "text-classification",
    )  # fmt: skip
    with raises_code("unsupported-structure", InputError) as error:
        TorchProgramFormat().check(tiny.as_artifact(ctx.out, "text-classification"))
    assert "bert.embeddings.word_embeddings" in str(error.value)


class Doubled(torch.nn.Module):
    def forward(self, input_ids, attention_mask):
        return input_ids * 2.0


@pytest.mark.quick
def test_program_with_other_outputs_is_an_error():
    program = TorchProgram(Doubled(), ("input_ids", "attention_mask"), 10, 8, None)
    program.require_equal(Doubled(), "model.pt2", iter([(2, 5)]))
    with raises_code("parity-failed", RunError):
        program.require_equal(lambda ids, mask: ids * 2.0 + 0.1, "model.pt2", iter([(2, 5)]))


@pytest.mark.quick
def test_model_that_cannot_be_captured_is_refused_with_its_name():
    program = TorchProgram(_uncapturable(), ("input_ids", "attention_mask"), 10, 8, None)
    with raises_code("unsupported-structure", InputError) as error:
        program.export()
    assert "Inner" in str(error.value)


def _uncapturable():
    class Inner(torch.nn.Module):
        pass

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Inner()

        def forward(self, input_ids, attention_mask):
            return input_ids * 2.0 if input_ids.sum() > 3 else input_ids  # depends on values

    return Outer()
