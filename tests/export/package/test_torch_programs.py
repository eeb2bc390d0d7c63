"""The formats of one captured program: another process opens the file, without smelt, and agrees."""

import contextlib
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

import smelt
from smelt.api.package import find_package_format, package_artifact
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.errors import InputError, MissingDependencyError, RunError
from smelt.export.package.package_format import PackageOrigin
from smelt.export.package.torch_program import TorchProgram, TorchProgramFormat, answer_code
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
RUN_NCNN = """
import sys
sys.modules.update(dict.fromkeys(["smelt", "transformers", "torch"]))
import numpy, ncnn
network = ncnn.Net()
options = network.opt
options.use_fp16_packed = options.use_fp16_storage = options.use_fp16_arithmetic = False
assert not network.load_param("model.ncnn.param") and not network.load_model("model.ncnn.bin")
extractor = network.create_extractor()
for position, array in enumerate(numpy.load("inputs.npz").values()):
    array = array.astype(numpy.int32) if array.dtype == numpy.int64 else array
    extractor.input(f"in{position}", ncnn.Mat(array[0]).clone())
status, output = extractor.extract("out0")
assert not status
numpy.save("output.npy", output.numpy()[None])
"""
RUN_LITERT = """
import sys
sys.modules.update(dict.fromkeys(["smelt", "transformers", "torch"]))
import numpy
from ai_edge_litert.interpreter import Interpreter
arrays = numpy.load("inputs.npz").items()
inputs = {n: a.astype(numpy.int32) if a.dtype == numpy.int64 else a for n, a in arrays}
run = Interpreter("model.tflite").get_signature_runner(SIGNATURE)
numpy.save("output.npy", run(**inputs)["output_0"])
"""
PACKAGES = {
    "executorch": ("executorch.runtime",), "ncnn": ("pnnx", "ncnn"),
    "litert": ("ai_edge_litert.interpreter", "litert_torch"),
}  # fmt: skip
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


def require_extra(name):
    for package in PACKAGES[name]:
        pytest.importorskip(package, reason=f"pip install 'smelt[{name}]'")


def input_names(folder):
    return json.loads(re.search(r"names = (\[.*?\])", (folder / "README.md").read_text())[1])


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
    require_extra("executorch")
    artifact = torch_artifact(kind)
    folder = package_artifact(artifact, format="executorch", out=tmp_path / "package").folder
    for length in (3, 11):
        arrays, batch = inputs_of(input_names(folder), 1, length)
        with open_folder(artifact, "torch", None, 1) as runner:
            expected = runner.forward(batch)
        np.testing.assert_allclose(outputs(folder, RUN_EXECUTORCH, arrays), expected, atol=1e-5)


# pnnx and litert-torch take 1 to 9 s a model
@pytest.mark.parametrize("kind", ["classifier", "embedder", "tagger", "masked", "vit", "resnet"])
def test_ncnn_network_equals_its_model_in_another_process(kind, tmp_path):
    require_extra("ncnn")
    artifact = torch_artifact(kind)
    folder = package_artifact(artifact, format="ncnn", out=tmp_path / "package").folder
    names = re.findall(r"in\d is (\w+)", (folder / "README.md").read_text())
    assert "attention_mask" not in names
    for length in (3, 11):
        arrays, _ = inputs_of(names, 1, length)
        batch = ImageBatch(*arrays.values()) if names == ["pixel_values"] else unpadded(arrays["input_ids"])
        with open_folder(artifact, "torch", None, 1) as runner:
            expected = runner.forward(batch)
        np.testing.assert_allclose(outputs(folder, RUN_NCNN, arrays), expected, rtol=1e-5, atol=1e-5)


def unpadded(ids):
    return Batch(ids, np.ones_like(ids))


@pytest.mark.parametrize("name", ["ncnn", "litert"])
@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (ShareWeights(), ShareWeightsSettings(targets=["ffn"])),
        (Factorize(), FactorizeSettings(method="svd", optimize_for="size", rank=6)),
    ],
)
def test_shared_and_factorized_layers_are_kept(name, stage, settings, tmp_path):
    """`write` compares each file with the model in its own runtime."""
    require_extra(name)
    source = tiny.write_bert(tmp_path / "m", num_hidden_layers=2)
    ctx = harness.run_stage(stage, settings, source, tmp_path / "out", "text-classification")
    artifact = tiny.as_artifact(ctx.out, "text-classification")
    (tmp_path / "package").mkdir()
    find_package_format(name).write(artifact, PackageOrigin(), tmp_path / "package")


def test_operators_that_ncnn_has_no_layer_for_are_named(tmp_path):
    require_extra("ncnn")
    with raises_code("unsupported-structure", InputError) as error:
        package_artifact(torch_artifact("roberta"), format="ncnn", out=tmp_path / "package")
    # RoBERTa counts positions from the tokens that are not padding
    assert "RobertaForSequenceClassification" in str(error.value)
    assert "torch.ne" in str(error.value)
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("kind", ["classifier", "roberta", "embedder", "vit", "resnet"])
def test_litert_signatures_equal_their_model_in_another_process(kind, tmp_path):
    require_extra("litert")
    artifact = torch_artifact(kind)
    folder = package_artifact(artifact, format="litert", out=tmp_path / "package").folder
    readme = (folder / "README.md").read_text()
    names = re.search(r"Inputs, by name: (.*?) \(", readme)[1].split(", ")
    signatures = re.search(r"Signatures: (.*?)\.", readme)[1].split(", ")
    for signature in signatures:
        arrays, batch = inputs_of(names, 1, int(signature.rpartition("_")[2]) if "_" in signature else 1)
        with open_folder(artifact, "torch", None, 1) as runner:
            expected = runner.forward(batch)
        actual = outputs(folder, f"SIGNATURE = {signature!r}\n{RUN_LITERT}", arrays)
        np.testing.assert_allclose(actual, expected, atol=1e-5)


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
    assert re.search(r"^LABEL_\d \[\[", done.stdout)


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_missing_package_is_an_error_with_the_extra(name, tmp_path, monkeypatch):
    for package in PACKAGES[name]:
        monkeypatch.setitem(sys.modules, package.partition(".")[0], None)
        monkeypatch.setitem(sys.modules, package, None)
    with raises_code("not-installed", MissingDependencyError) as error:
        package_artifact(torch_artifact("classifier"), format=name, out=tmp_path / "package")
    assert f"smelt[{name}]" in str(error.value)
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("name", ["ncnn", "litert"])
def test_example_of_the_package_prints_class_and_logits_of_its_text(name, tmp_path):
    require_extra(name)
    artifact = torch_artifact("classifier")
    folder = package_artifact(artifact, format=name, out=tmp_path / "package").folder
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=folder, capture_output=True, text=True, check=True, timeout=300
    )
    printed = [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", done.stdout)]
    assert done.stdout.startswith(f"LABEL_{np.argmax(printed)} ")
    ids = np.array([AutoTokenizer.from_pretrained(folder)("A text.")["input_ids"]])
    with open_folder(artifact, "torch", None, 1) as runner:
        expected = runner.forward(unpadded(ids))
    np.testing.assert_allclose(printed, expected[0], atol=1e-4)


@pytest.mark.parametrize("name", ["torch-export", "litert", "ncnn"])
def test_example_of_the_package_prints_the_logits_of_its_image(name, tmp_path):
    """By Pillow alone, as smelt reads images: torchvision brings torch and computes other pixels."""
    if name in PACKAGES:
        require_extra(name)
    artifact = torch_artifact("vit")
    folder = package_artifact(artifact, format=name, out=tmp_path / "package").folder
    readme = (folder / "README.md").read_text()
    assert "torchvision" not in readme
    assert "photo.jpg" in readme.partition("```python")[2].rpartition("```")[2]  # the user adds it
    pixels = np.random.default_rng(0).integers(0, 256, size=(50, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "photo.jpg")
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=folder, capture_output=True, text=True, check=True, timeout=300
    )
    logits = re.search(r"\[[^\[\]]+\]", done.stdout)[0]
    printed = [float(number) for number in re.findall(r"nan|-?\d+\.\d*(?:e-?\d+)?", logits)]
    processor = AutoImageProcessor.from_pretrained(folder)
    batch = ImageBatch(processor(Image.open(folder / "photo.jpg"), return_tensors="np")["pixel_values"])
    with open_folder(artifact, "torch", None, 1) as runner:
        expected = runner.forward(batch)
    np.testing.assert_allclose(printed, expected[0], atol=1e-4)
    names = json.loads((folder / "config.json").read_text())["id2label"]
    assert done.stdout.startswith(names[str(expected[0].argmax())])


def run_answer(config, task, output, tmp_path, **variables):
    """Run the lines that print `output` in a folder with this config.json; return what they print."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"} | config))
    printed = io.StringIO()
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(printed):
        exec(answer_code(task, tmp_path), {"output": np.float32(output), **variables})
    return printed.getvalue()


@pytest.mark.parametrize(
    ("problem", "output", "expected"),
    [
        ("single_label_classification", [[-2, 0.5, 2]], "c ["),
        ("multi_label_classification", [[0.5, -1, 2]], "['a', 'c'] ["),
    ],
)
def test_answer_of_an_example_names_the_classes(problem, output, expected, tmp_path):
    config = {"problem_type": problem, "id2label": {"0": "a", "1": "b", "2": "c"}}
    assert run_answer(config, "text-classification", output, tmp_path).startswith(expected)


def test_answer_of_a_regression_example_is_a_number(tmp_path):
    config = {"problem_type": "regression", "id2label": {"0": "LABEL_0"}}
    assert run_answer(config, "text-classification", [[1.5]], tmp_path) == "[[1.5]]\n"


def test_answer_of_a_tagger_example_has_a_class_for_each_token(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(torch_artifact("tagger"))
    inputs = tokenizer(["a man"], return_tensors="np", padding="max_length", max_length=6)
    output = np.eye(2)[[[0, 1, 0, 0, 0, 0]]]  # the second token, which is the first of the text
    config = {"id2label": {"0": "O", "1": "B-PER"}}
    printed = run_answer(config, "token-classification", output, tmp_path, tokenizer=tokenizer, inputs=inputs)
    lines = [line.split()[-1] for line in printed.splitlines()]
    assert lines == ["B-PER", *["O"] * (inputs["attention_mask"].sum() - 3)]


@pytest.mark.parametrize("name", ["torch-export", "executorch", "litert", "ncnn"])
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
