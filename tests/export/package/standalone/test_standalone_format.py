"""infer.py answers as smelt does, token for token, without anything of smelt, torch or transformers."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires, version

import numpy as np
import onnx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import smelt
from smelt.core.artifact import read_artifact
from smelt.core.errors import InputError
from smelt.export.package.package_format import PackageOrigin
from smelt.export.package.standalone.classes import predict_class, prediction_line
from smelt.export.package.standalone_format import StandaloneFormat
from smelt.export.package.write_package import write_package
from smelt.runtimes.single_call_runners import ClassPrediction
from smelt.tasks.classification import prediction_text
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.graphs.standalone_packages import GENERATION_SETTINGS, TEXTS, standalone_package
from tests.support.models import images, tiny
from tests.support.pairs import matrix

FORBIDDEN = ("torch", "transformers", "smelt", "onnx", "safetensors", "huggingface_hub", "pydantic")
CLASSES = {
    "translation": "Translator", "summarization": "Translator", "language-modeling": "Writer",
    "text-classification": "Classifier", "sentence-similarity": "Embedder",
    "image-classification": "ImageClassifier",
}  # fmt: skip
LESS = ["--max-new-tokens", 4]
GENERATING = ("translator", "t5", "writer", "int8-caches", "gpt2")


@pytest.fixture(scope="module")
def classifier():
    return standalone_package("classifier")


@pytest.fixture
def opened(monkeypatch):
    """Open the package's own class, while nothing that is forbidden can be imported."""
    for name in {*FORBIDDEN, *(n for n in sys.modules if n.partition(".")[0] in FORBIDDEN)}:
        monkeypatch.setitem(sys.modules, name, None)

    def open_it(folder):
        spec = importlib.util.spec_from_file_location("infer", folder / "infer.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        task = json.loads((folder / "infer.json").read_text())["task"]
        return getattr(module, CLASSES[task])(folder)

    return open_it


def loaded(kind, call):
    """What smelt makes of the artifact, asked while its imports are there."""
    with (
        smelt.load(exported_artifacts.exported_artifact(kind)) as model,
        pytest.warns(smelt.TruncationWarning),
    ):
        return call(model)


@pytest.mark.parametrize(
    ("kind", "wishes"),
    matrix.matrix_cells(GENERATING, list(GENERATION_SETTINGS), full=lambda kind: kind == "translator"),
)
def test_texts_equal_smelt_generation(kind, wishes, request):
    generation = GENERATION_SETTINGS[wishes]
    expected = loaded(kind, lambda model: model.generate(TEXTS, **generation))
    small = loaded(kind, lambda model: model.generate(TEXTS, batch_size=3, **generation))
    folder = standalone_package(kind, generation)
    model = request.getfixturevalue("opened")(folder)
    assert model(TEXTS) == expected
    assert model(iter(TEXTS), batch_size=3) == small
    assert model.tokenizer.cut == 2 * 1
    assert model([]) == []
    assert len(set(expected)) > 4


@pytest.mark.parametrize(("kind", "wishes"), [("mbart", "beams"), ("m2m_100", "rules")])
def test_other_families_equal_smelt_in_requested_language(kind, wishes, request):
    generation = GENERATION_SETTINGS[wishes]
    expected = loaded(kind, lambda model: model.generate(TEXTS, **generation))
    folder = standalone_package(kind, generation)
    forced_tokens = json.loads((folder / "infer.json").read_text())["generation"]["forced_bos"]
    added_tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    names = {added_token["id"]: added_token["content"] for added_token in added_tokens}
    language = {"mbart": ["de_DE"], "m2m_100": ["deu_Latn"]}[kind]
    assert [names[token] for token in forced_tokens] == language
    model = request.getfixturevalue("opened")(folder)
    assert model(TEXTS) == expected
    assert len(set(expected)) > 3
    model.search["forced_tokens"][:] = -1  # nothing is forced, so the texts are others
    model.search["rule_biases"][:] = 0
    assert model(TEXTS) != expected


@pytest.mark.parametrize("kind", ["classifier", "roberta"])
def test_classes_equal_smelt_predictions(kind, request):
    long = " ".join(tiny.SENTENCES * 3)
    inputs = [*TEXTS, ("a man", "two dogs run"), (long, "two dogs"), ("a cat", long), (long, long + " a")]
    expected = loaded(kind, lambda model: model.predict(inputs))
    folder = standalone_package(kind)
    model = request.getfixturevalue("opened")(folder)
    predictions = model(inputs)
    assert [label for label, _ in predictions] == [prediction.label for prediction in expected]
    for (_, probabilities), prediction in zip(predictions, expected, strict=True):
        assert probabilities == pytest.approx(dict(prediction.probabilities), abs=1e-12)
    assert model.cut == 4
    assert model([]) == []


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_image_classes_equal_smelt_predictions(family, tmp_path, request):
    files = [tmp_path / f"{image_index}.png" for image_index in range(5)]
    for image_index, file in enumerate(files):
        images.make_image(
            image_index, size=(20 + image_index, 30), mode=("RGB", "L", "RGBA")[image_index % 3]
        ).save(file)
    with smelt.load(exported_artifacts.exported_artifact(family)) as model:
        expected = model.classify(files, batch_size=2)
    folder = standalone_package(family)
    model = request.getfixturevalue("opened")(folder)
    predictions = model(files, batch_size=2)
    assert [label for label, _ in predictions] == [prediction.label for prediction in expected]
    for (_, probabilities), prediction in zip(predictions, expected, strict=True):
        assert probabilities == pytest.approx(dict(prediction.probabilities), abs=1e-12)
    data = files[0].read_bytes()
    for (label, probabilities), expected_answer in zip(
        model([data, model.pixels(data)]), predictions[:1] * 2, strict=True
    ):
        assert (label, probabilities) == (expected_answer[0], pytest.approx(expected_answer[1], abs=1e-6))
    assert model([]) == []


def test_image_command_line_equals_smelt_predict(tmp_path):
    images.make_image(1).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    name, folder = str(tmp_path / "a.png"), standalone_package("vit")
    expected = harness.smelt(
        "predict", exported_artifacts.exported_artifact("vit"), name, code=0
    ).stdout.splitlines()
    assert command(folder, name) == (expected, "")
    assert command(folder, lines=f"{name}\n".encode()) == (expected, "")
    for invalid in (str(tmp_path / "b.png"), str(tmp_path / "none.png"), str(tmp_path)):
        output_lines, errors = command(folder, name, invalid, code=2)
        assert (output_lines, "Traceback" in errors) == ([], False)


@pytest.mark.parametrize("kind", ["classifier", "embedder"])
def test_non_finite_outputs_raise_error(kind, tmp_path):
    folder = tmp_path / "p"
    shutil.copytree(standalone_package(kind), folder)
    model = onnx.load(folder / "model.onnx")
    output = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["finite" if name == output else name for name in node.output]
    nan = onnx.numpy_helper.from_array(np.float32(np.nan), "nan")
    model.graph.initializer.append(nan)
    model.graph.node.append(onnx.helper.make_node("Add", ["finite", "nan"], [output]))
    onnx.save(model, folder / "model.onnx")
    done = subprocess.run(
        [sys.executable, "infer.py", "a man"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[2Jevil\n", "\\x1b[2Jevil\\x0a"),
        ("\u06cc\u200c\u0627", "\u06cc\u200c\u0627"),
    ],  # and Persian, with a joiner
)
def test_control_characters_in_labels_are_escaped(name, shown):
    assert prediction_line(name, {name: 0.5}) == f"{shown}\t0.500"
    assert prediction_text(ClassPrediction(name, {name: 0.5})) == f"{shown}\t0.500"


@pytest.mark.quick
def test_prediction_without_a_label_is_a_line_of_dashes():
    assert prediction_line((), {"a": 0.5}) == "-\t-"
    assert prediction_text(ClassPrediction((), {"a": 0.5})) == "-\t-"


def test_embeddings_equal_smelt(request):
    expected = loaded("embedder", lambda model: model.embed(TEXTS))
    folder = standalone_package("embedder")
    model = request.getfixturevalue("opened")(folder)
    np.testing.assert_array_equal(model(TEXTS), expected)
    assert model([]).shape == (0, expected.shape[1])


@pytest.mark.parametrize(("problem", "logits", "expected"), [
    ("multi_label_classification", [2.0, -1.0, 0.5], ("a", "c")),
    ("multi_label_classification", [-2.0, -1.0, -0.5], ()),
    ("single_label_classification", [2.0, -1.0, 2.5], "c"), ("regression", [2.25], 2.25),
    ("regression", [2.25, 0, 0.5], (2.25, 0.0, 0.5)),
])  # fmt: skip
def test_predict_class_supports_every_problem_type(problem, logits, expected):
    label, probabilities = predict_class(np.array(logits, dtype=np.float32), ["a", "b", "c"], problem)
    assert label == expected
    assert type(label) is type(expected)
    if problem == "regression":
        assert probabilities == {}
    elif problem == "multi_label_classification":
        assert probabilities == pytest.approx(
            dict(zip("abc", 1 / (1 + np.exp(-np.array(logits))), strict=True))
        )
    else:
        assert sum(probabilities.values()) == pytest.approx(1)


def command(folder, *words, lines=None, code=0):
    """Run infer.py as a user does, in a process whose Python may not find smelt."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({FORBIDDEN}, None)); import runpy, os;"
    run = "sys.argv = ['infer.py', *sys.argv[1:]]; runpy.run_path('infer.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked} {run}", *words],
        cwd=folder,
        input=lines,
        capture_output=True,
        timeout=120,
        check=False,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode().splitlines(), done.stderr.decode()


@pytest.mark.parametrize("kind", ["translator", "classifier", "embedder", "writer"])
def test_command_line_equals_smelt_predict(kind):
    folder = standalone_package(kind)
    texts = ["a man in a red hat", "two dogs\trun", " ".join(tiny.SENTENCES * 3)]
    extra_arguments = ["--max-new-tokens", 4] if kind in GENERATING else []
    expected = harness.smelt(
        "predict", exported_artifacts.exported_artifact(kind), *texts, *extra_arguments, code=0
    ).stdout.splitlines()
    output_lines, errors = command(folder, *texts)
    assert output_lines == expected
    assert errors == "warning: texts longer than the model takes, which were cut: 1\n"
    lines = ("\ufeff" + "\r\n".join(texts[:2]) + "\n").encode()
    assert command(folder, lines=lines) == (expected_of_lines(kind, texts[:2], extra_arguments), "")


def test_help_option_is_not_treated_as_text():
    output_lines, errors = command(standalone_package("classifier"), "--help")
    assert (output_lines[0], errors) == ("usage: infer.py [-h] [text ...]", "")
    assert any("standard input" in line for line in output_lines)


def test_dashed_texts_need_separator_and_unknown_options_are_rejected():
    folder = standalone_package("translator")
    texts = ["--help", "-5 dogs run"]
    assert command(folder, "--", *texts) == (expected_of_lines("translator", texts, LESS), "")
    assert command(folder, texts[1]) == (expected_of_lines("translator", texts[1:], LESS), "")
    output_lines, errors = command(folder, "--num-beams", "4", code=2)
    assert (output_lines, errors.splitlines()[-1]) == (
        [],
        "infer.py: error: unrecognized arguments: --num-beams",
    )


@pytest.mark.parametrize(("words", "lines", "expected"), [
    ((), b"two dogs\r\na \xff man\n", r"'a \udcff man'"),
    ((b"two dogs", b"a \xff man"), None, r"'a \udcff man'"),
])  # fmt: skip
def test_invalid_utf_8_is_reported_without_traceback(words, lines, expected):
    output_lines, errors = command(standalone_package("translator"), *words, lines=lines, code=2)
    last = errors.splitlines()[-1]
    assert output_lines == []
    assert last.startswith("infer.py: error: ")
    assert "UTF-8" in last
    assert last.endswith(f": {expected}")


def expected_of_lines(kind, texts, more):
    return harness.smelt(
        "predict", exported_artifacts.exported_artifact(kind), *more, "--", *texts, code=0
    ).stdout.splitlines()


def test_package_is_loadable_as_artifact(tmp_path):
    folder = standalone_package("translator")
    assert harness.smelt("predict", folder, "two dogs", code=0).output
    data = tiny.write_pairs(tmp_path / "rows.jsonl", 4)
    assert "bleu" in harness.smelt("eval", folder, "--data", data, code=0).output
    with smelt.load(folder) as model, smelt.load(exported_artifacts.exported_artifact("translator")) as other:
        assert model.generate(TEXTS[:3]) == other.generate(TEXTS[:3])


def test_edited_infer_script_does_not_invalidate_package(tmp_path):
    folder = tmp_path / "p"
    shutil.copytree(standalone_package("classifier"), folder)
    for name in (
        "infer.py", "serve.py", "requirements.txt", "requirements-serve.txt", "Dockerfile", "README.md",
        "infer.json",
    ):  # fmt: skip
        (folder / name).write_text((folder / name).read_text() + "\n")
    harness.smelt("predict", folder, "two dogs", code=0)


def test_package_contains_expected_files():
    folder = standalone_package("translator")
    first, *lines = (folder / "requirements.txt").read_text().splitlines()
    assert first == "# pip install --no-deps -r requirements.txt"
    assert [line.split("==")[0] for line in lines] == ["numpy", "onnxruntime", "sentencepiece"]
    assert all(re.fullmatch(r"[a-z]+==[\d.]+", line) for line in lines)
    assert (
        (standalone_package("t5") / "requirements.txt").read_text().splitlines()[3].startswith("tokenizers==")
    )


def test_requirements_of_the_service_include_their_dependencies():
    comment, included, *lines = (
        (standalone_package("translator") / "requirements-serve.txt").read_text().splitlines()
    )
    assert (comment, included) == (
        "# pip install --no-deps -r requirements-serve.txt",
        "-r requirements.txt",
    )
    requirements = [Requirement(line) for line in lines]
    assert all(str(requirement.specifier) == f"=={version(requirement.name)}" for requirement in requirements)
    names = {canonicalize_name(requirement.name) for requirement in requirements}
    assert names > {"starlette", "uvicorn", "prometheus-client"}
    environment = {"extra": "", "python_version": "3.11"}  # no extras
    for name in names:
        for dependency in map(Requirement, requires(name) or []):
            if dependency.marker is None or dependency.marker.evaluate(environment):
                assert canonicalize_name(dependency.name) in names


def test_transformers_only_tokenizer_is_rejected(tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(exported_artifacts.exported_artifact("classifier"), folder)
    artifact = read_artifact(folder)
    StandaloneFormat().check(artifact)
    (folder / "tokenizing.json").unlink()
    with raises_code("unsupported-tokenizer", InputError) as excinfo:
        StandaloneFormat().check(artifact)
    assert "tokenizing.json" in str(excinfo.value)


def test_export_without_generation_graph_is_rejected(tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(exported_artifacts.exported_artifact("translator"), folder)
    (folder / "generate_beams.onnx").unlink()
    with raises_code("missing-graph", InputError) as excinfo:
        StandaloneFormat().check(read_artifact(folder))
    assert excinfo.value.file == "generate_beams.onnx"
    assert "generation_graph: true" in str(excinfo.value)


def test_unsupported_generation_setting_is_rejected_and_folder_removed(tmp_path):
    artifact = read_artifact(exported_artifacts.exported_artifact("translator"))
    origin = PackageOrigin(generation={"bad_words_ids": [[3, 4]]})
    with raises_code("unsupported-generation-setting", InputError):
        write_package(StandaloneFormat(), artifact, origin, tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_sampling_is_reported(tmp_path):
    artifact = read_artifact(exported_artifacts.exported_artifact("writer"))
    origin = PackageOrigin(generation={"do_sample": True, "temperature": 0.7, "max_new_tokens": 4})
    package = write_package(StandaloneFormat(), artifact, origin, tmp_path / "p")
    assert "draws tokens at random" in (package.folder / "README.md").read_text()
    assert json.loads((package.folder / "infer.json").read_text())["generation"]["graph"] == "generate.onnx"


def test_threads_default_to_artifact_setting(monkeypatch, tmp_path, classifier, opened):
    import onnxruntime

    folder = tmp_path / "p"
    shutil.copytree(classifier, folder)
    content = json.loads((folder / "infer.json").read_text())
    (folder / "infer.json").write_text(json.dumps(content | {"threads": 3}))
    thread_counts = []
    original = onnxruntime.InferenceSession

    def spy(path, options, **more):
        thread_counts.append(options.intra_op_num_threads)
        return original(path, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    type(opened(folder))(folder, threads=2)
    opened(classifier)
    assert thread_counts == [3, 2, 0]
