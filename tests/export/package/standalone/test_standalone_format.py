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
from smelt.runtimes.runner import ClassPrediction
from smelt.tasks.classification import prediction_text
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.graphs.standalone_packages import GENERATION_SETTINGS, TEXTS, standalone_package
from tests.support.models import images, tiny
from tests.support.pairs import matrix

FORBIDDEN = ("torch", "transformers", "smelt", "onnx", "safetensors", "huggingface_hub", "pydantic")
CLASSES = {
    "translation": "Translator",
    "summarization": "Translator",
    "language-modeling": "Writer",
    "text-classification": "Classifier",
    "sentence-similarity": "Embedder",
    "image-classification": "ImageClassifier",
}
LESS = ["--max-new-tokens", 4]
GENERATING = ("translator", "t5", "bart", "writer", "int8-caches", "gpt2")


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
def test_texts_are_those_of_smelt(kind, wishes, request):
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


@pytest.mark.parametrize(
    ("kind", "wishes"), [("mbart", "greedy"), ("mbart", "beams"), ("m2m_100", "rules"), ("pegasus", "beams")]
)
def test_other_families_say_what_smelt_says_in_the_language_that_was_asked(kind, wishes, request):
    generation = GENERATION_SETTINGS[wishes]
    expected = loaded(kind, lambda model: model.generate(TEXTS, **generation))
    folder = standalone_package(kind, generation)
    forced = json.loads((folder / "infer.json").read_text())["generation"]["forced_bos"]
    words = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    names = {word["id"]: word["content"] for word in words}
    language = {"mbart": ["de_DE"], "m2m_100": ["deu_Latn"], "pegasus": []}[kind]
    assert [names[token] for token in forced] == language
    model = request.getfixturevalue("opened")(folder)
    assert model(TEXTS) == expected
    assert len(set(expected)) > 3
    if forced:
        model.search["forced_tokens"][:] = -1  # nothing is forced, so the texts are others
        model.search["rule_biases"][:] = 0
        assert model(TEXTS) != expected


@pytest.mark.parametrize("kind", ["classifier", "roberta"])
def test_classes_are_those_of_smelt(kind, request):
    long = " ".join(tiny.SENTENCES * 3)
    given = [*TEXTS, ("a man", "two dogs run"), (long, "two dogs"), ("a cat", long), (long, long + " a")]
    expected = loaded(kind, lambda model: model.predict(given))
    folder = standalone_package(kind)
    model = request.getfixturevalue("opened")(folder)
    found = model(given)
    assert [label for label, _ in found] == [one.label for one in expected]
    for (_, chances), one in zip(found, expected, strict=True):
        assert chances == pytest.approx(dict(one.probabilities), abs=1e-12)
    assert model.cut == 4
    assert model([]) == []


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_images_are_those_of_smelt(family, tmp_path, request):
    files = [tmp_path / f"{number}.png" for number in range(5)]
    for number, file in enumerate(files):
        images.make_image(number, size=(20 + number, 30), mode=("RGB", "L", "RGBA")[number % 3]).save(file)
    with smelt.load(exported_artifacts.exported_artifact(family)) as model:
        expected = model.classify(files, batch_size=2)
    folder = standalone_package(family)
    model = request.getfixturevalue("opened")(folder)
    found = model(files, batch_size=2)
    assert [label for label, _ in found] == [one.label for one in expected]
    for (_, chances), one in zip(found, expected, strict=True):
        assert chances == pytest.approx(dict(one.probabilities), abs=1e-12)
    data = files[0].read_bytes()
    for (label, chances), wanted in zip(model([data, model.pixels(data)]), found[:1] * 2, strict=True):
        assert (label, chances) == (wanted[0], pytest.approx(wanted[1], abs=1e-6))
    assert model([]) == []


def test_the_command_line_of_images_prints_what_smelt_predict_prints(tmp_path):
    images.make_image(1).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    name, folder = str(tmp_path / "a.png"), standalone_package("vit")
    expected = harness.smelt(
        "predict", exported_artifacts.exported_artifact("vit"), name, code=0
    ).stdout.splitlines()
    assert command(folder, name) == (expected, "")
    assert command(folder, lines=f"{name}\n".encode()) == (expected, "")
    for wrong in (str(tmp_path / "b.png"), str(tmp_path / "none.png"), str(tmp_path)):
        found, errors = command(folder, name, wrong, code=2)
        assert (found, "Traceback" in errors) == ([], False)


@pytest.mark.parametrize("kind", ["classifier", "embedder"])
def test_outputs_that_are_no_numbers_are_an_error(kind, tmp_path):
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
def test_names_of_labels_move_no_cursor(name, shown):
    assert prediction_line(name, {name: 0.5}) == f"{shown}\t0.500"
    assert prediction_text(ClassPrediction(name, {name: 0.5})) == f"{shown}\t0.500"


def test_vectors_are_those_of_smelt(request):
    expected = loaded("embedder", lambda model: model.embed(TEXTS))
    folder = standalone_package("embedder")
    model = request.getfixturevalue("opened")(folder)
    np.testing.assert_array_equal(model(TEXTS), expected)
    assert model([]).shape == (0, expected.shape[1])


@pytest.mark.parametrize(
    ("problem", "logits", "expected"),
    [
        ("multi_label_classification", [2.0, -1.0, 0.5], ("a", "c")),
        ("multi_label_classification", [-2.0, -1.0, -0.5], ()),
        ("single_label_classification", [2.0, -1.0, 2.5], "c"),
        ("regression", [2.25, 0, 0], 2.25),
    ],
)
def test_answers_of_every_kind_of_classifier(problem, logits, expected):
    label, chances = predict_class(np.array(logits, dtype=np.float32), ["a", "b", "c"], problem)
    assert label == expected
    assert type(label) is type(expected)
    if problem == "regression":
        assert chances == {}
    elif problem == "multi_label_classification":
        assert chances == pytest.approx(dict(zip("abc", 1 / (1 + np.exp(-np.array(logits))), strict=True)))
    else:
        assert sum(chances.values()) == pytest.approx(1)


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
def test_the_command_line_prints_what_smelt_predict_prints(kind):
    folder = standalone_package(kind)
    texts = ["a man in a red hat", "two dogs\trun", " ".join(tiny.SENTENCES * 3)]
    more = ["--max-new-tokens", 4] if kind in GENERATING else []
    expected = harness.smelt(
        "predict", exported_artifacts.exported_artifact(kind), *texts, *more, code=0
    ).stdout.splitlines()
    found, errors = command(folder, *texts)
    assert found == expected
    assert errors == "warning: texts longer than the model takes, which were cut: 1\n"
    lines = ("\ufeff" + "\r\n".join(texts[:2]) + "\n").encode()
    assert command(folder, lines=lines) == (expected_of_lines(kind, texts[:2], more), "")


def test_help_is_no_text():
    found, errors = command(standalone_package("classifier"), "--help")
    assert (found[0], errors) == ("usage: infer.py [-h] [text ...]", "")
    assert any("standard input" in line for line in found)


def test_words_with_a_dash_are_texts_behind_two_dashes_and_unknown_options_are_none():
    folder = standalone_package("translator")
    words = ["--help", "-5 dogs run"]
    assert command(folder, "--", *words) == (expected_of_lines("translator", words, LESS), "")
    assert command(folder, words[1]) == (expected_of_lines("translator", words[1:], LESS), "")
    found, errors = command(folder, "--num-beams", "4", code=2)
    assert (found, errors.splitlines()[-1]) == ([], "infer.py: error: unrecognized arguments: --num-beams")


@pytest.mark.parametrize(
    ("words", "lines", "expected"),
    [
        ((), b"two dogs\r\na \xff man\n", r"'a \udcff man'"),
        ((b"two dogs", b"a \xff man"), None, r"'a \udcff man'"),
    ],
)
def test_bytes_that_are_no_text_are_told_without_a_traceback(words, lines, expected):
    found, errors = command(standalone_package("translator"), *words, lines=lines, code=2)
    last = errors.splitlines()[-1]
    assert found == []
    assert last.startswith("infer.py: error: ")
    assert "UTF-8" in last
    assert last.endswith(f": {expected}")


def expected_of_lines(kind, texts, more):
    return harness.smelt(
        "predict", exported_artifacts.exported_artifact(kind), *more, "--", *texts, code=0
    ).stdout.splitlines()


def test_the_package_is_an_artifact_that_smelt_takes(tmp_path):
    folder = standalone_package("translator")
    assert harness.smelt("predict", folder, "two dogs", code=0).output
    data = tiny.write_pairs(tmp_path / "rows.jsonl", 4)
    assert "bleu" in harness.smelt("eval", folder, "--data", data, code=0).output
    with smelt.load(folder) as model, smelt.load(exported_artifacts.exported_artifact("translator")) as other:
        assert model.generate(TEXTS[:3]) == other.generate(TEXTS[:3])


def test_who_edits_infer_py_breaks_nothing(tmp_path):
    folder = tmp_path / "p"
    shutil.copytree(standalone_package("classifier"), folder)
    for name in (
        "infer.py", "serve.py", "requirements.txt", "requirements-serve.txt", "Dockerfile", "README.md",
        "infer.json",
    ):  # fmt: skip
        (folder / name).write_text((folder / name).read_text() + "\n")
    harness.smelt("predict", folder, "two dogs", code=0)


def test_what_is_beside_infer_py():
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
    assert all(str(one.specifier) == f"=={version(one.name)}" for one in requirements)
    names = {canonicalize_name(one.name) for one in requirements}
    assert names > {"starlette", "uvicorn", "prometheus-client"}
    environment = {"extra": "", "python_version": "3.11"}  # no extras
    for name in names:
        for dependency in map(Requirement, requires(name) or []):
            if dependency.marker is None or dependency.marker.evaluate(environment):
                assert canonicalize_name(dependency.name) in names


def test_texts_that_transformers_reads_are_refused(tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(exported_artifacts.exported_artifact("classifier"), folder)
    artifact = read_artifact(folder)
    StandaloneFormat().check(artifact)
    (folder / "tokenizing.json").unlink()
    with raises_code("unsupported-tokenizer", InputError) as caught:
        StandaloneFormat().check(artifact)
    assert "tokenizing.json" in str(caught.value)


def test_an_export_without_the_loop_is_refused(tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(exported_artifacts.exported_artifact("translator"), folder)
    (folder / "generate_beams.onnx").unlink()
    with raises_code("missing-graph", InputError) as caught:
        StandaloneFormat().check(read_artifact(folder))
    assert caught.value.file == "generate_beams.onnx"
    assert "generation_graph: true" in str(caught.value)


def test_what_no_graph_does_is_refused_and_nothing_is_left(tmp_path):
    artifact = read_artifact(exported_artifacts.exported_artifact("translator"))
    wishes = PackageOrigin(generation={"bad_words_ids": [[3, 4]]})
    with raises_code("unsupported-generation-setting", InputError):
        write_package(StandaloneFormat(), artifact, wishes, tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_sampled_texts_are_told(tmp_path):
    artifact = read_artifact(exported_artifacts.exported_artifact("writer"))
    wishes = PackageOrigin(generation={"do_sample": True, "temperature": 0.7, "max_new_tokens": 4})
    package = write_package(StandaloneFormat(), artifact, wishes, tmp_path / "p")
    assert "draws tokens at random" in (package.folder / "README.md").read_text()
    assert json.loads((package.folder / "infer.json").read_text())["generation"]["graph"] == "generate.onnx"


def test_threads_are_those_of_the_caller_else_those_that_the_artifact_names(
    monkeypatch, tmp_path, classifier, opened
):
    import onnxruntime

    folder = tmp_path / "p"
    shutil.copytree(classifier, folder)
    content = json.loads((folder / "infer.json").read_text())
    (folder / "infer.json").write_text(json.dumps(content | {"threads": 3}))
    seen = []
    real = onnxruntime.InferenceSession

    def spy(path, options, **more):
        seen.append(options.intra_op_num_threads)
        return real(path, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    type(opened(folder))(folder, threads=2)
    opened(classifier)
    assert seen == [3, 2, 0]
